"""Decoding of multi-head latent attention."""
