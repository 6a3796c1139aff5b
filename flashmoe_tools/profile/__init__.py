"""Where a kernel spends its time.

metrics     reduces Nsight Compute's CSV to the few numbers that matter
collect     one launch under ncu, after warm-up; the program that it launches is target
resources   without ncu: what the build's resource table and the benchmark's timings say
diagnose    applies rules.toml to those numbers: a diagnosis, with the rule that fired
difference  two profiles side by side
"""
