"""`mpicoll doctor --flight DIR`: what the dumps of the flight recorder say."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpicoll.cli.common import console, fault_of, refuse, write_json
from mpicoll.cli.flight_dumps import Found, read
from mpicoll.cli.flight_findings import BYTES, Finding, conclude, moments
from mpicoll.cli.flight_graph import LAST, Place, Scene
from mpicoll.cli.flight_words import clock, present, short, spans
from mpicoll.runtime.flight import ASKED, SIGNALLED
from mpicoll.runtime.record import Record

ROWS = 20  #: of a table that are shown

_WORST = frozenset({"mismatch", "deadlock", "failed", "missing", "behind", "ended"})


def report(folder: str, json_file: str | None) -> None:
    """Read the dumps in ``folder`` and say what they mean; exit status 1 if something is wrong.

    Loads no MPI.
    """
    refuse(fault_of(json_file))
    path = Path(folder)
    if not path.is_dir():
        raise click.UsageError(f"there is no folder {folder} with dumps of the flight recorder")
    found = read(path)
    if not found.dumps:
        left = f" ({'; '.join(found.faults)})" if found.faults else ""
        raise click.UsageError(f"there is no dump of the flight recorder in {folder}{left}")
    scene = Scene(found.dumps)
    findings = conclude(scene)
    show(console(json_file), scene, found, findings)
    write_json(json_file, "flight", data(scene, found, findings))
    if any(finding.kind in _WORST for finding in findings):
        raise click.exceptions.Exit(1)


def data(scene: Scene, found: Found, findings: list[Finding]) -> dict[str, Any]:
    """Return what --json writes."""
    return {
        "world": scene.world,
        "missing": list(scene.missing),
        "left_out": list(found.faults),
        "note": moments(scene),
        "findings": [asdict(one) | {"sequence": one.sequence % LAST} for one in findings],
        "dumps": [
            {
                "rank": rank,
                "host": dump.host,
                "pid": dump.pid,
                "reason": dump.reason,
                "wall": dump.wall,
            }
            for rank, dump in scene.dumps.items()
        ],
        "communicators": [
            {
                "identity": identity,
                "name": group.name,
                "ranks": len(group.ranks),
                "places": [
                    _place(rank, place) for rank, place in sorted(scene.places[identity].items())
                ],
            }
            for identity, group in scene.groups.items()
        ],
    }


def _place(rank: int, place: Place) -> dict[str, Any]:
    return {
        "rank": rank,
        "done": place.done.sequence if place.done else 0,
        "running": [
            {
                "sequence": one.sequence,
                "collective": one.collective,
                "step": one.step,
                "steps": one.steps,
                "waits": list(one.waits),
                "site": one.site,
            }
            for one in place.running
        ],
    }


def show(screen: Console, scene: Scene, found: Found, findings: list[Finding]) -> None:
    """Print the conclusion, then how far each rank is."""
    colours = {"together": "yellow", "stalled": "yellow"}
    for finding in findings:
        screen.print(finding.text, style=colours.get(finding.kind, "bold red"), markup=False)
        if finding.rows:
            screen.print(_mismatch(finding))
    if not findings:
        screen.print("Nobody waits: every rank has completed its last call.", style="green")
    screen.print()
    for identity, group in scene.groups.items():
        if any(place.reached for place in scene.places[identity].values()):
            screen.print(_progress(scene, identity, f"{group.name}, {len(group.ranks)} rank(s)"))
            screen.print()
    last = clock(max(dump.wall for dump in scene.dumps.values()))
    screen.print(
        f"{len(scene.dumps)} of {scene.world} rank(s) dumped, the last at {last}: {_why(scene)}",
        markup=False,
    )
    if note := moments(scene):
        screen.print(f"note: {note}", style="yellow", markup=False)
    for fault in found.faults:
        screen.print(f"left out: {fault}", style="yellow", markup=False)


def _why(scene: Scene) -> str:
    """Return why the lowest rank dumped of those that met an error, and how many more did else.

    What leads to this command is left out.
    """
    reasons = [dump.reason for dump in scene.dumps.values()]
    own = [one for one in reasons if not one.startswith((SIGNALLED, ASKED))]
    shown = (own or reasons)[0]
    lines = [line for line in shown.splitlines() if "mpicoll doctor --flight" not in line]
    if more := sum(one != shown for one in reasons):
        lines.append(f"and {more} more rank(s)")
    return "\n".join(lines)


def _mismatch(finding: Finding) -> Table:
    table = Table("ranks", "collective", "algorithm", "count", "dtype", "operator", "root", "at")
    for row in finding.rows[:ROWS]:
        root = str(row.root) if row.root >= 0 else "-"
        names = (row.ranks, row.collective, row.algorithm or "-", str(row.count))
        dtype = row.dtype or (BYTES if row.count else "-")
        table.add_row(*map(Text, (*names, dtype, row.operator or "-", root, short(row.site))))
    return table


def _progress(scene: Scene, identity: str, title: str) -> Table:
    """Return how far the ranks are on a communicator: those alike in one row, the last first."""
    table = Table(
        "ranks", "completed", "in", "step", "waits for", "since", "at", title=Text(title)
    )
    table.title_justify = "left"
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    ranks = scene.groups[identity].ranks
    for rank, place in scene.places[identity].items():
        one = place.running[0] if place.running else None
        done = place.done.sequence if place.done else 0
        where = (one.sequence, one.collective, one.step, one.waits, one.site) if one else ()
        now = (rank in scene.ended, _own_line(scene, rank, place))
        alike[done, where, len(place.running), now].append(rank)
    rows = sorted(alike.values(), key=lambda some: (scene.places[identity][some[0]].reached, some))
    for some in rows[:ROWS]:
        table.add_row(*map(Text, _cells(scene, identity, some)))  # no markup, whatever is in it
    absent = [rank for rank in ranks if rank not in scene.dumps]
    if absent:
        table.add_row(spans(absent), "no dump", "", "", "", "", "")
    if len(rows) > ROWS:
        table.add_row(f"and {len(rows) - ROWS} more", "", "", "", "", "", "")
    return table


def _cells(scene: Scene, identity: str, some: list[int]) -> tuple[str, ...]:
    places, ranks = scene.places[identity], scene.groups[identity].ranks
    done, running = places[some[0]].done, places[some[0]].running
    completed = f"#{done.sequence} {done.collective}" if done else "none"
    if done and done.error:
        completed += " (error)"
    if not running:
        site = _own_line(scene, some[0], places[some[0]]) or (short(done.site) if done else "")
        end = max(scene.dumps[rank].wall_of(_end(places[rank])) for rank in some) if done else 0.0
        since = f"completed {clock(end)}" if done else ""
        where = "ended" if some[0] in scene.ended else "no call"
        return spans(some), completed, where, "", "", since, site
    one = running[0]
    waits = sorted({ranks[wait] for rank in some for wait in places[rank].running[0].waits})
    start = min(scene.dumps[rank].wall_of(places[rank].running[0].start) for rank in some)
    more = f" and {len(running) - 1} more" if len(running) > 1 else ""
    step = f"{one.step} of {one.steps}" if one.steps else "-"
    called = f"#{one.sequence} {one.collective}{more}"
    return spans(some), completed, called, step, spans(waits), clock(start), short(one.site)


def _own_line(scene: Scene, rank: int, place: Place) -> str:
    """Return where a rank is in its own code; "" for one in a call, here or elsewhere."""
    own = not place.running and not scene.dumps[rank].inside
    return present(scene, rank) if own else ""


def _end(place: Place) -> float:
    done: Record | None = place.done
    return done.end if done else 0.0
