"""Holds what a pass is given, and answers questions that several passes ask of it."""
