"""What flashmoe's plug-ins need from vLLM and SGLang, checked against the engines' sources without installing them.

signatures.py parses Python sources; contract.py states what the plug-ins call and implement, and compares; wheels.py downloads the
pinned wheels (wheels.toml) and keeps the modules that the contract names; recorded.json holds the findings, for the tests and docs/integrations.md.
"""
