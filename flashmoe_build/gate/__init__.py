"""The gate ladder: what is known good, rung by rung, and the first rung that is not.

ladder.toml, ladder   the rungs as data
execute               one program with a time limit, judged by its report
climb                 the rungs in order, within a budget, until one fails
decide                the baseline's numbers against the thresholds: stop, caution, go on, next bottleneck
history               what was recorded for each commit; the last known good
bisect, step          git bisect over rungs of the ladder, in a worktree
"""
