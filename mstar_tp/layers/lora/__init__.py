"""Layers that add the deltas of a step's adapters."""
