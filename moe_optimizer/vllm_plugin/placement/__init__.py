"""Puts the experts on the ranks that the plan names."""
