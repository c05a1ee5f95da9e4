"""LoRA adapters: their files, this rank's shard of them, and their deltas on the device."""
