"""Commands beside the server: merge, convert, check, inspect, replay and top."""
