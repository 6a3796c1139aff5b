"""A product with one weight matrix, whose bits do not depend on the number of rows."""
