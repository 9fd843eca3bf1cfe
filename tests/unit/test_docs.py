"""The pages that are made from the code are up to date, and links lead somewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_algorithms_page_is_what_the_docstrings_say() -> None:
    reference = ROOT / "docs" / "reference"
    made = runpy.run_path(str(reference / "make_algorithms.py"))["text"]()
    written = (reference / "algorithms.md").read_text(encoding="utf-8")
    assert written == made, "run: python docs/reference/make_algorithms.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
