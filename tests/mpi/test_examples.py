"""The Python examples of README and docs run, those of a page one after the other, on any
number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
EXAMPLES = {
    str(page.relative_to(ROOT)): found
    for page in PAGES
    if (found := BLOCK.findall(page.read_text(encoding="utf-8")))
}


@pytest.mark.parametrize("page", EXAMPLES)
def test_examples(page: str) -> None:
    names = {"__name__": "example"}
    for number, code in enumerate(EXAMPLES[page], 1):
        exec(compile(code, f"{page}, example {number}", "exec"), names)
