"""The operators of operations that have no package of their own yet."""
