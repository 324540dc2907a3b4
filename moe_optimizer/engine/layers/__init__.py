"""The layers that the model families share. Each loads its own weights: `Layer.load_weight`."""
