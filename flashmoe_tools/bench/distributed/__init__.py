"""The suite of several GPUs: one process a rank, started by torchrun.

parts      what is measured, from the suite's file
overlap    how much of the messages' time the computation hides
measure    clocks, bytes and profiles of calls that all ranks make together
contenders what each part times, and what is right
session    all of it, and the report
"""
