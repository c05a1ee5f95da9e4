"""The frontend process: the HTTP API, and the conductor that speaks to the ranks. No torch."""
