"""A training step of the mixture-of-experts layer with e4m3 products."""
