"""Attention: plans of a step's rows, and the backends that run them."""
