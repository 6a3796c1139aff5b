"""The version, read by the package and by the wheel builder, and the name under which pip knows the package."""

__version__ = "0.1.0"
# The index has strangers' packages called `flashmoe` and `flashmoe-py`. A test holds this against pyproject.toml.
DISTRIBUTION = "flashmoe-kernels"
WHEEL_PREFIX = DISTRIBUTION.replace("-", "_") + "-"  # of the file names of our wheels
