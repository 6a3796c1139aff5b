"""A complete decoder, as a server and a trainer run it: tokens over a paged cache, and a training forward pass."""
