"""The page that explains the example quotes it as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "docs" / "examples" / "strata-level-sqlite"
QUOTED = [
    *sorted(EXAMPLE.rglob("*.py")),
    EXAMPLE / "pyproject.toml",
    ROOT / "tests/examples/test_sqlite_level_conformance.py",
]

BLOCKS = re.findall(r"^```(?:python|toml)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[block.strip().splitlines()[-1].strip()[:40] for block in BLOCKS])
def test_a_quotation_is_in_the_example(block: str) -> None:
    assert any(block in path.read_text(encoding="utf-8") for path in QUOTED)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
