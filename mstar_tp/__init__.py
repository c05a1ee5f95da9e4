"""Tensor-parallel serving of one base model with many LoRA adapters."""
