"""Benchmarks: suites as data, results checked before they are timed, verdicts that start from undecided.

suites, case        what is timed, read from TOML
contenders          what is compared: our kernels, torch's backends, other libraries
verify              the correctness rule that a contender must pass before it is timed
sampling, plan      one slot of samples; how many samples fit the time
runner, session     one cell; one whole run, with a partial report when it is stopped
statistics, verdict intervals, ratios and what may be said about them
summary             raw samples to the report's numbers
summaries           a report without its samples, and back
markdown, page, index  what people read
compare, ratchet    two reports; a report against the marks kept for each model of GPU
"""
