"""What the sub-commands share: console, JSON output, names and sizes of the command line."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from mpicoll._version import __version__
from mpicoll.cli import launch
from mpicoll.schedule.contracts import COLLECTIVES

WIDTH = 100
JSON_FORM = 1  #: of what --json writes; raised when a field changes its meaning

if TYPE_CHECKING:  # generic in the stubs of newer versions only
    _Text: TypeAlias = click.ParamType[str]
    _Numbers: TypeAlias = click.ParamType[tuple[int, ...]]
else:
    _Text = _Numbers = click.ParamType

_Command = TypeVar("_Command", bound=Callable[..., Any])
_ALIASES = {
    "broadcast": "bcast",
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "all_to_all": "alltoall",
    "reducescatter": "reduce_scatter",
}


def console(json_file: str | None = None) -> Console:
    """Return the console of rank 0; a silent one elsewhere and where JSON goes to stdout.

    Under a launcher there is no colour, unless FORCE_COLOR is set: some give their ranks
    a terminal even where the output goes to a file.
    """
    launched = launch.found() is not None and "FORCE_COLOR" not in os.environ
    return Console(
        width=min(shutil.get_terminal_size((WIDTH, 50)).columns or WIDTH, WIDTH)
        if sys.stdout.isatty() and not launched
        else WIDTH,
        quiet=not launch.speaks() or json_file == "-",
        no_color=launched or None,
        force_terminal=False if launched else None,
        highlight=False,
        soft_wrap=False,
    )


def progress_bar(screen: Console) -> Progress:
    """Return a bar that shows how many of the cases are done; only on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=screen,
        transient=True,
        disable=screen.quiet or not screen.is_terminal,
    )


def json_option(command: _Command) -> _Command:
    """Add --json FILE."""
    return click.option(
        "--json",
        "json_file",
        metavar="FILE",
        help="Write the results as JSON too; - is the standard output, in place of the tables.",
    )(command)


def fault_of(file: str | None) -> str:
    """Return why ``file`` can not be written, or an empty string."""
    if file is None or file == "-":
        return ""
    path = Path(file)
    if path.is_dir():
        return f"{file} is a folder, expected a file"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent} to write {path.name} into"
    place = path if path.exists() else path.parent
    return "" if os.access(place, os.W_OK) else f"{file} can not be written"


def refuse(fault: str) -> None:
    """Raise a usage error, if there is a fault."""
    if fault:
        raise click.UsageError(fault)


def write_json(file: str | None, command: str, data: dict[str, Any]) -> None:
    """Write the results of ``command``, if a file was named; on rank 0 only."""
    if file is None or not launch.speaks():
        return
    head = {"mpicoll": __version__, "form": JSON_FORM, "command": command}
    text = json.dumps({**head, **data}, indent=2, ensure_ascii=False) + "\n"
    if file == "-":
        sys.stdout.write(text)
    else:
        Path(file).write_text(text, encoding="utf-8")


class Name(_Text):
    """One of some names; case, - for _, and torch's spellings do not matter."""

    name = "name"

    def __init__(self, known: Sequence[str] = COLLECTIVES) -> None:
        self.known = tuple(known)

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> str:
        """Return the name as this package spells it."""
        name = str(value).lower().replace("-", "_")
        for spelling in (name, _ALIASES.get(name, name)):
            if spelling in self.known:
                return spelling
        if name == "bcast" and "broadcast" in self.known:
            return "broadcast"
        self.fail(f"there is no {value!r}; known: {', '.join(self.known)}", param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: Any = None) -> str:
        """Return what --help shows."""
        return "COLLECTIVE"


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """Return the bytes of ``8``, ``64K``, ``16M``, ``1G`` (powers of 1024)."""
    word = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = word[-1:] if word[-1:] in _UNITS else ""
    number = word.removesuffix(unit)
    if not number.isdigit():
        raise ValueError(f"{text!r} is no size; examples: 8, 64K, 16M")
    return int(number) * _UNITS[unit]


class Sizes(_Numbers):
    """Message sizes: ``8:16M`` (times 4), ``8:16M:2`` (times 2), or ``8,1K,1M``."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> tuple[int, ...]:
        """Return the sizes in bytes, growing."""
        if isinstance(value, tuple):
            return value
        try:
            return sizes(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of a list or a range."""
    if ":" not in text:
        return tuple(sorted({parse_bytes(word) for word in text.split(",")}))
    words = text.split(":")
    if len(words) > 3:
        raise ValueError(f"{text!r}: expected FIRST:LAST or FIRST:LAST:FACTOR")
    first, last = parse_bytes(words[0]), parse_bytes(words[1])
    factor = int(words[2]) if len(words) == 3 and words[2].isdigit() else 4
    if not 1 <= first <= last or factor < 2 or (len(words) == 3 and not words[2].isdigit()):
        raise ValueError(f"{text!r}: expected 1 <= FIRST <= LAST and a FACTOR of at least 2")
    found = [first]
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return tuple(found)


def human_bytes(nbytes: float) -> str:
    """Return bytes as ``96 B``, ``1.5 KiB``, ``16 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"


def human_seconds(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1 or unit == "µs":
            return f"{three(seconds * factor)} {unit}"
    raise AssertionError


def human_rate(rate: float) -> str:
    """Return bytes per second, powers of 1000, as ``12.5 GB``."""
    for unit in ("B", "kB", "MB"):
        if rate < 1000:
            return f"{three(rate)} {unit}"
        rate /= 1000
    return f"{three(rate)} GB"


def three(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
