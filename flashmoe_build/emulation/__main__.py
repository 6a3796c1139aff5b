"""Entry of ``python -m flashmoe_build.emulation``."""

import sys

from flashmoe_build.emulation.cli import main

sys.exit(main())
