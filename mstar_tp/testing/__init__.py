"""Makers of tiny models and adapters, a server in a process, and faults, for tests of one's own."""
