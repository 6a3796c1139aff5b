"""Attention over ragged batches with score options, forward and backward together."""
