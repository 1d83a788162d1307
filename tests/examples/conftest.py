"""Makes the example plugins of the documentation importable without installing them."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

sys.path.insert(0, str(EXAMPLES / "strata-level-sqlite"))
