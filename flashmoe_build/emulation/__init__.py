"""Runs the CUDA kernels on the CPU: the unchanged kernel sources, compiled by g++ against csrc/emulation.

    python -m flashmoe_build.emulation --kernel sm80 --shape b1.h2.kv1.q65.k65.d64 --seeds 8

See docs/emulation.md for what is modelled and what is not.
"""
