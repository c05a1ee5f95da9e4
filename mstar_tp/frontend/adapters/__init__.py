"""Adapters as clients see them: served names, loads, on-demand folders, saved state."""
