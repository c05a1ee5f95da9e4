"""CUDA graphs of decode steps: sizes, capture, replay."""
