"""The version, read by the package and by the wheel builder, and the package's name on PyPI."""

__version__ = "0.1.0"
# PyPI has unrelated packages called `flashmoe` and `flashmoe-py`. A test compares this name with pyproject.toml.
DISTRIBUTION = "flashmoe-kernels"
WHEEL_PREFIX = DISTRIBUTION.replace("-", "_") + "-"  # how the file names of our wheels begin
