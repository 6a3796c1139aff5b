"""Entry of ``python -m flashmoe_build.emulation``."""

from __future__ import annotations

import sys

from flashmoe_build.emulation.cli import main

sys.exit(main())
