"""config.json of each model family, read strictly. Imports no torch."""
