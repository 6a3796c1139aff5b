"""The version, read by the package and by the wheel builder."""

__version__ = "0.1.0"
