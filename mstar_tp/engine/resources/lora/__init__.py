"""Adapters on one rank: device slots, CPU cache and the registry of served names."""
