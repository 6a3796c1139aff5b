"""Mixture of experts with weights of 4 bits (mxfp4)."""
