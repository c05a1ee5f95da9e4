"""Adapter files: keys, configs, placing, digests. Imports no torch."""
