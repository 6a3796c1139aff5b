"""What a kernel tile costs in shared memory, and on which GPU it fits."""
