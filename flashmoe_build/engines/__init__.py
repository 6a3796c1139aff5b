"""What flashmoe's plug-ins take from vLLM and SGLang, held against the engines' own sources without installing them.

signatures.py reads Python sources by their syntax trees; contract.py says what the plug-ins call and implement and compares; wheels.py brings the
pinned wheels (wheels.toml) and keeps of them what the contract names; recorded.json is what was found, for the tests and docs/integrations.md.
"""
