"""The mixture-of-experts layer: routing, grouped products, combination."""
