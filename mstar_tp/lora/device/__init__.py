"""Adapter weights in device slots, and the operators that apply them."""
