"""How many examples property tests of kernels draw: the interpreter is slow."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("few", max_examples=8, deadline=None, derandomize=True, database=None)
settings.register_profile("many", max_examples=300, deadline=None)
