"""Parts that every other package may use: errors, logging, environment, files, processes."""
