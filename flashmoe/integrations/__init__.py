"""Ways in from code that people already have: torch's own attention functions, transformers."""
