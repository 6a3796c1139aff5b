"""The backward pass of attention over ragged batches."""
