"""Small problems for the kernels of a mixture-of-experts layer, run on the emulated machine and checked against fp64."""
