"""Messages between frontend and ranks, and the ZeroMQ channels that carry them."""
