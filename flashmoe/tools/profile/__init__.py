"""Where the time of a kernel goes.

metrics     Nsight Compute's CSV to the few numbers that decide
collect     one launch under ncu, after warm-up; the program that it launches is target
resources   without ncu: what the build's resource table and the benchmark's timings say
diagnose    rules.toml over those numbers: a diagnosis in words, with the rule that fired
difference  two profiles side by side
"""
