"""``python -m flashmoe doctor``: what this machine has, what is wrong with it, and how to fix it.

``facts`` holds the findings, ``collect`` gathers them, ``judge`` turns them into verdicts (pure), and ``probe`` imports
torch and loads the extension in a separate process.
"""
