"""Commands that exist only in a checkout; flashmoe/__main__.py offers them when it can import this module."""

COMMANDS = {
    "gate": (
        "flashmoe_build.gate.cli",
        "run the steps from the environment to the baseline; stop at the first failure",
    ),
    "history": ("flashmoe_build.gate.history", "what the gate found for each commit; the last known good"),
    "bisect": ("flashmoe_build.gate.bisect", "find the first commit that fails a gate"),
}
