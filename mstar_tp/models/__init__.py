"""Model families, their configs and the weight loader. Importing this package imports no torch."""
