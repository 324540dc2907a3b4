"""Measures what GPUs of one machine take to exchange tensors."""
