"""The leader's decisions: which requests wait, which run, and what the next step holds."""
