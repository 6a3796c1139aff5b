"""Proves, without loading it, that an extension can be imported and its kernels launched. See ``engine.audit``."""

from flashmoe_tools.audit.engine import Options, audit

__all__ = ["Options", "audit"]
