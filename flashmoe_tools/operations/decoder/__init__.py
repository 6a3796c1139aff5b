"""A whole decoder, as a server and as a trainer run it: tokens over a paged cache, and a training forward pass."""
