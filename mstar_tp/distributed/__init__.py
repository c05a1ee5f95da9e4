"""Process groups: start-up, collectives over torch.distributed and shared memory, sharding."""
