"""Entry points from other libraries: torch's own attention functions, transformers, vLLM, SGLang."""
