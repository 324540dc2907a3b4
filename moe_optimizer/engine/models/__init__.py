"""The model families, one file each, and the decoder they share."""
