"""The HTTP API: routes, request bodies, access, answers and errors."""
