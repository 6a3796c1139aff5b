"""Planted bugs: generated from the kernels' source by rules, and written by hand; and the hunt for them."""
