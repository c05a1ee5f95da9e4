"""Triton kernels for adapter deltas on linears, embedding and head."""
