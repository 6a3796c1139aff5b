"""Attention over ragged batches and paged caches, with windows, soft caps, sinks and masks."""
