"""The kernels of a mixture-of-experts layer on the emulated machine: problems, runs and references."""
