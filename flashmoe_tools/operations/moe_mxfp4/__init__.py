"""Mixture of experts with 4-bit weights (mxfp4)."""
