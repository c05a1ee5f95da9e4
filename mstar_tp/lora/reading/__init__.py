"""Reading an adapter's tensors into this rank's CPU copy."""
