"""Attention over dense tensors: the backward pass only."""
