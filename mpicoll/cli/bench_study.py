"""`mpicoll bench --study`: what decides real speed, in five comparisons. Loads mpi4py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table

from mpicoll.cli import timing
from mpicoll.cli.common import human_seconds, three
from mpicoll.cli.mpi import MPI
from mpicoll.cli.timing import Contender
from mpicoll.cli.world import native
from mpicoll.comm import Comm

AGAIN = "again"
DOUBLE = np.dtype(np.float64)

#: Lines of a comparison by their label.
Lines: TypeAlias = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender of a comparison, and the label of the one that its time is divided by."""

    contender: Contender
    base: str

    @property
    def label(self) -> str:
        """The name of the contender."""
        return self.contender.name


@dataclass(frozen=True, slots=True)
class Figure:
    """One more column: its head, its numbers by label, and how one is shown.

    ``ask`` is called after the race with the number of rounds, on all ranks.
    """

    head: str
    ask: Callable[[int], dict[str, float]]
    show: Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A question, who takes part, and the sentence that is made of the figures."""

    title: str
    what: str
    entries: Sequence[Entry]
    conclude: Callable[[Lines], str]
    figure: Figure | None = None


Maker: TypeAlias = Callable[[Comm, Sequence[str], ExitStack], Comparison]


def run_studies(
    screen: Console, comm: Comm, compared: bool, seconds: float, repeats: int
) -> list[dict[str, Any]]:
    """Run and show the five comparisons; return their lines, alike on all ranks."""
    from mpicoll.cli.bench_comparisons import COMPARISONS

    who = ("mpicoll", "native") if compared else ("mpicoll",)
    found = []
    for key, make in COMPARISONS.items():
        with ExitStack() as stack:
            study = make(comm, who, stack)
            lines = _run(comm, study, seconds, repeats)
        found.append(
            {
                "study": key,
                "title": study.title,
                "what": study.what,
                "lines": list(lines.values()),
                "conclusion": study.conclude(lines),
            }
        )
        _show(screen, found[-1], study.figure)
    return found


def _run(comm: Comm, study: Comparison, seconds: float, repeats: int) -> Lines:
    """Race the entries and the first once more, whose ratio is the noise."""
    if not study.entries:
        return {}
    contenders = [entry.contender for entry in study.entries]
    contenders.append(replace(contenders[0], name=AGAIN))
    measured = timing.race(native(comm), contenders, seconds, repeats)
    times = {one.name: one for one in measured}
    base = times[contenders[0].name].seconds
    noise = timing.spread_of_median(times[AGAIN].seconds, base)
    rounds = int(base.size)
    figures = study.figure.ask(rounds) if study.figure else {}
    lines: Lines = {}
    first, *others = study.entries
    for entry in (first, Entry(contenders[-1], first.label), *others):
        seconds_of, base = times[entry.label].seconds, times[entry.base].seconds
        interval = timing.spread_of_median(seconds_of, base)
        lines[entry.label] = {
            "label": entry.label,
            "seconds": times[entry.label].summary(),
            "base": entry.base,
            "ratio": timing.ratio(seconds_of, base)["median"],
            "interval": interval,
            "verdict": "same" if entry.label == AGAIN else timing.verdict(interval, noise),
            "rounds": rounds,
            "figure": figures.get(entry.label),
            "fault": times[entry.label].fault,
        }
    return lines


def _show(screen: Console, study: dict[str, Any], figure: Figure | None) -> None:
    screen.print(f"[bold]{study['title']}[/bold]")
    screen.print(f"[dim]{study['what']}[/dim]")
    if study["lines"]:
        board = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        board.add_column("", no_wrap=True)
        for head in ("min", "median", "p99"):
            board.add_column(head, justify="right", no_wrap=True)
        board.add_column("/ the 1 above", no_wrap=True)
        if figure:
            board.add_column(figure.head, justify="right", no_wrap=True)
        for line in study["lines"]:
            board.add_row(*_cells(line, figure))
        screen.print(board)
    for line in study["lines"]:
        if line["fault"]:
            screen.print(f"[bold red]{line['label']}:[/] {line['fault']}")
    screen.print(f"→ {study['conclusion']}\n")


def _cells(line: dict[str, Any], figure: Figure | None) -> list[str]:
    times = [human_seconds(line["seconds"][key]) for key in ("min", "median", "p99")]
    ratio = "1"
    if line["base"] != line["label"]:
        low, high = map(three, line["interval"])
        ratio = f"{three(line['ratio'])} ({low}–{high})"
    name = "[bold red]WRONG[/] " * bool(line["fault"]) + line["label"]
    if line["label"] == AGAIN:
        name = "the same again: the noise"
    extra = "" if figure is None or line["figure"] is None else figure.show(line["figure"])
    return [name, *times, ratio, *([extra] if figure else [])]


def called_on(comm: Comm, who: str) -> MPI.Intracomm:
    """Return the communicator of "mpicoll" or of "native"."""
    return comm if who == "mpicoll" else native(comm)


def times_as_long(line: dict[str, Any]) -> str:
    """Return a ratio in words, with its interval; within the noise it is no difference."""
    interval = "–".join(map(three, line["interval"]))
    if line["verdict"] == "same":
        return f"as long within the noise ({interval} times)"
    return f"{three(line['ratio'])} times as long ({interval})"
