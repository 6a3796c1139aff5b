"""The commands that only a checkout has: flashmoe/__main__.py offers them where this module can be imported."""

COMMANDS = {
    "gate": (
        "flashmoe_build.gate.cli",
        "run the steps from the environment to the baseline; stop at the first failure",
    ),
    "history": ("flashmoe_build.gate.history", "what the gate found for each commit; the last known good"),
    "bisect": ("flashmoe_build.gate.bisect", "find the first commit that fails a gate"),
}
