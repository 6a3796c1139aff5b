"""The backward pass of the mixture-of-experts layer."""
