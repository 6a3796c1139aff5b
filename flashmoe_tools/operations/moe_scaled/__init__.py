"""The mixture-of-experts layer with e4m3 weights and block scales."""
