"""The adapters that are known and served: loading, validating and unloading them."""
