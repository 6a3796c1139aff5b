"""Attention: what a user calls, and the operators behind it."""
