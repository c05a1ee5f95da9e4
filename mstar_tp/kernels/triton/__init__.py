"""Triton kernels: CUDA devices, and CPU tensors under Triton's interpreter (for tests)."""
