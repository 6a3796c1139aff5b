"""``python -m flashmoe verify FILE.whl``: was this wheel built from the commit that it names?

Nothing that the wheel says about itself improves a verdict. ``content`` reads the wheel, ``repository`` reads the
objects of a clone without its configuration, ``files`` compares what the commit determines, ``rebuild`` builds the
commit and compares the rest, ``signature`` checks who signed.
"""
