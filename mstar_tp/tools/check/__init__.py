"""Saying before anything serves what an adapter, a model or a whole deployment is, and all that is
wrong with it: by the functions that the ranks and the frontend use themselves.
"""
