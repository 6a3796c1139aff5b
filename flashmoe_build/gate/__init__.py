"""The gate: the steps from a sound environment to a measured speed, in order, stopped at the first that fails.

steps      the steps as data, cheapest proof first
execute    one program with a time limit, judged by its report
pipeline   the steps in order, within a time budget, and one report over all of them
decide     the baseline's numbers against the thresholds: stop, caution, go on, next bottleneck
history    what was recorded for each commit; the last known good
bisect     git bisect over some of the steps, in a worktree; ``commit`` judges one commit
"""
