"""The Python examples of README and docs run, those of a page one after the other, on any
number of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpicoll import Comm

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
EXAMPLES = {
    str(page.relative_to(ROOT)): found
    for page in PAGES
    if (found := BLOCK.findall(page.read_text(encoding="utf-8")))
}


@pytest.fixture
def as_before(world: Comm) -> Iterator[None]:
    """What an example asks for on COMM_WORLD, such as a time limit, ends with it.

    All wraps of a communicator share their settings, those of later tests too.
    """
    from mpicoll.runtime import watchdog

    link = world._link
    settings, watched = link.settings, link.watched
    yield
    if link.watched and not watched:
        watchdog.WATCHED.remove(link)
        link.watched = False
    link.apply(settings)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("page", EXAMPLES)
def test_examples(page: str) -> None:
    names = {"__name__": "example"}
    for number, code in enumerate(EXAMPLES[page], 1):
        exec(compile(code, f"{page}, example {number}", "exec"), names)
