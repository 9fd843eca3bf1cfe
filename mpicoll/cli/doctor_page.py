"""The page of `mpicoll doctor`. Loads no MPI."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from mpicoll.cli import device_words, launch
from mpicoll.cli.common import WIDTH
from mpicoll.cli.devices import Node, Pointers
from mpicoll.cli.doctor_advice import Advice
from mpicoll.selection.settings import PREFIX

NODES = 8  #: that are shown one by one
_INDENT = 12  #: of what stands beside the labels
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim"}


def show(
    screen: Console,
    ranks: int,
    facts: dict[str, Any],
    nodes: Sequence[Node],
    direct: Sequence[Pointers],
    advice: Sequence[Advice],
) -> None:
    """Print the facts, then what is wrong."""
    columns = _columns(screen)
    for label, text in _rows(ranks, facts, nodes, direct):
        _print(screen, f"{label:{_INDENT}}", "bold", text, columns)
    screen.print()
    for kind, text in advice:
        _print(screen, f"{kind}: ", _COLOURS[kind], text, columns)
    if not any(kind in ("error", "warning") for kind, _ in advice):
        screen.print("[green]nothing is wrong[/]")


def _columns(screen: Console) -> int | None:
    """Return how wide the page is; None: lines are not broken, since a program reads them."""
    if screen.is_terminal:
        return screen.width
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    # Behind a launcher there may be a terminal.
    return None if launch.found() is None else WIDTH


def _print(screen: Console, head: str, style: str, text: str, columns: int | None) -> None:
    """Print lines beside a head; words, such as paths, stay whole."""
    indent = " " * len(head)
    lines = text.splitlines() or [""]
    if columns is not None:
        room = max(columns - len(head), 20)
        lines = [piece for line in lines for piece in _broken(line, room)]
    for number, line in enumerate(lines):
        whole = ((indent if number else head) + line).rstrip()
        shown = Text(whole)
        if number == 0:
            shown.stylize(style, 0, len(head))
        shown.highlight_words(["(oversubscribed)"], "yellow")
        screen.print(shown, soft_wrap=True)


def _broken(line: str, room: int) -> list[str]:
    return textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]


def _rows(
    ranks: int, facts: dict[str, Any], nodes: Sequence[Node], direct: Sequence[Pointers]
) -> Iterator[tuple[str, str]]:
    """Yield labels, and what stands beside them."""
    yield "MPI", f"{facts['mpi']} (standard {facts['mpi_standard']})"
    started = launch.found()
    told = f", which says {started.size} ranks" if started and started.size else ""
    yield "launcher", f"{facts['launcher']}{told}"
    yield "world", f"{ranks} ranks see each other" if ranks > 1 else "1 rank"
    yield "threads", f"MPI_THREAD_{facts['thread_level']}"
    yield "", ""
    for number, node in enumerate(facts["nodes"][:NODES]):
        over = " (oversubscribed)" if node["oversubscribed"] else ""
        yield (
            "nodes" if number == 0 else "",
            f"{node['name']}: {node['ranks']} rank{'s' * (node['ranks'] != 1)}, "
            f"{node['cores']} core{'s' * (node['cores'] != 1)} to use, {node['binding']}{over}",
        )
    if len(facts["nodes"]) > NODES:
        yield "", f"and {len(facts['nodes']) - NODES} more"
    yield "processor", facts["cpu"]
    yield "devices", "\n".join(device_words.lines(nodes))
    yield "CUDA-aware", "\n".join(device_words.pointer_lines(direct))
    yield "", ""
    versions = facts["versions"]
    yield "versions", ", ".join(f"{name} {number}" for name, number in versions.items())
    yield "running", f"executor: {facts['executor']}; {facts['kernels']}"
    yield "", ""
    variables = [f"{name}={value}" for name, value in sorted(facts["variables"].items())]
    yield "variables", "\n".join(variables) or f"no {PREFIX}… variable is set"
    settings = [f"{name} by {algorithm}" for name, algorithm in facts["settings"].items()]
    rest = "everything by the automatic choice" if not settings else "the rest automatic"
    yield "settings", ", ".join([*settings, rest])
    yield "choice", facts["choice"]
