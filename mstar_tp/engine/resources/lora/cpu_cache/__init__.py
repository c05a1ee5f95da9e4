"""The CPU cache of adapters (the host tier): membership, reads, and memory."""
