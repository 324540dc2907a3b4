"""Loads servers with the same requests and says which is faster, and by how much."""
