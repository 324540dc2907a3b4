"""What each optimization of the embedded engine is worth: from a naive loop up, one added at a time."""
