"""Benchmarks of kernels, steps, scale and peers, run by ``scripts/bench.py``."""
