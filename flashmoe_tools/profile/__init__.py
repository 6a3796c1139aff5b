"""Where a kernel spends its time.

metrics     reduces Nsight Compute's CSV to the few numbers that matter
collect     profiles one launch with ncu, after warm-up; target is the program that launches it
resources   without ncu: the build's resource table and the benchmark's timings
diagnose    applies rules.toml to these numbers: a diagnosis, with the rule that fired
difference  two profiles side by side
"""
