"""Multi-head latent attention: all heads share one latent of 512 + 64 values per key."""
