"""Holds the Plan: frozen decisions with reasons, as data. Nothing here decides or applies anything."""
