"""Attention over ragged batches, windows, softcaps, sinks and masks, forward and backward together."""
