"""One training step of a small decoder."""
