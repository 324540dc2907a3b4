"""The layers that the model families share. Each says where its weights go: `Layer.places`."""
