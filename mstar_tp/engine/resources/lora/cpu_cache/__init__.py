"""The CPU cache of adapters (the CPU cache): membership, reads, and memory."""
