"""Attention over dense tensors, forward and backward together."""
