"""Benchmarks: suites as data, results checked before they are timed, verdicts that start as undecided.

suites, case        what is timed, read from TOML
contenders          what is compared: our kernels, torch's backends, other libraries
verify              the correctness rule that a contender must pass before it is timed
sampling, plan      one slot of samples; how many samples fit into the time
runner, session     one cell; a complete run, with a partial report if it is stopped
statistics, verdict intervals, ratios, and the verdicts that follow from them
summary             from raw samples to the report's numbers
summaries           a report without its samples, and back
markdown, page, index  output for people to read
compare, ratchet    two reports; a report against the marks kept for each GPU model
"""
