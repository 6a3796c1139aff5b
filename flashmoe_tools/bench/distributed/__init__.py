"""The multi-GPU suite: one process per rank, started by torchrun.

workloads  what is measured, read from the suite's file
overlap    how much communication time the computation hides
measure    clocks, bytes and profiles of calls that all ranks make together
contenders the calls that are timed, and the check of their results
session    runs everything and writes the report
"""
