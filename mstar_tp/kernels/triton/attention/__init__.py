"""Triton kernels for attention over KV pages."""
