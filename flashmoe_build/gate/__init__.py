"""The gate: steps that run from checking the environment to measuring speed, in order, stopping at the first that fails.

steps      the steps as data, cheapest proof first
execute    runs one program with a time limit and judges it by its report
pipeline   runs the steps in order, within a time budget, and writes one report over all of them
decide     compares the baseline's numbers with the thresholds: stop, caution, go on, next bottleneck
history    the record for each commit; the last known good
bisect     git bisect over some of the steps, in a worktree; ``commit`` judges one commit
"""
