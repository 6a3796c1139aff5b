"""Attention over dense tensors, the forward pass."""
