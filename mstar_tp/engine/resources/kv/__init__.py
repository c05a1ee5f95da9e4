"""KV pages: allocation, prefix cache, and moving them to host memory and back."""
