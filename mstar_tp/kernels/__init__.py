"""Kernels of our own, where one pass over memory beats what torch offers."""
