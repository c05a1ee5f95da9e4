"""Tensor-parallel layers, and attention over the step's plan."""
