"""``python -m flashmoe doctor``: what this machine has, what is wrong with it, and how to fix it.

``facts`` holds what was found, ``collect`` finds it, ``judge`` turns it into verdicts (pure), ``probe`` is the part that
imports torch and loads the extension, in a process of its own.
"""
