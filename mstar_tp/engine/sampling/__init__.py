"""Choosing tokens from logits, on the host or on the device, freely or under a grammar."""
