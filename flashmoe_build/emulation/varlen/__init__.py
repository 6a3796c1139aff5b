"""Ragged, paged and banded attention on emulated kernels: problem.py (what a problem is), tensors.py (its memory), reference.py (fp64),
cases.py (the suite of a kernel), run.py (a launch)."""
