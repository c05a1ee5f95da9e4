"""Triton kernels for routed experts and their adapters."""
