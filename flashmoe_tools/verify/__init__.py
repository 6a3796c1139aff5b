"""``python -m flashmoe verify FILE.whl``: was this wheel built from the commit that it names?

Nothing that the wheel says of itself makes a verdict better. ``content`` reads the wheel, ``repository`` the objects of a clone
without its configuration, ``files`` compares what the commit determines, ``rebuild`` builds the commit and compares the rest,
``signature`` checks who signed.
"""
