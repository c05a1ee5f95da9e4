"""Running one step on one rank: admit, plan, forward, sample, commit."""
