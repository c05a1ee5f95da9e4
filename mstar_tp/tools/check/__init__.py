"""Checks of an adapter, a model or a whole deployment before anything serves.

They call the functions that the ranks and the frontend use themselves.
"""
