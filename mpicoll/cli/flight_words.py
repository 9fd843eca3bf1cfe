"""Words for ranks, calls and times, as `mpicoll doctor --flight` prints them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

from mpicoll.cli.flight_graph import LAST, Node, Scene
from mpicoll.runtime.record import Record


def named(scene: Scene, node: Node) -> str:
    """Return a call with its algorithm, sequence number, communicator and site."""
    group = scene.groups[node.communicator].name
    if node.sequence == LAST:
        return f"finalize (the end of the program, on {group})"
    record = scene.record(node)
    by = f" by {record.algorithm}" if record.algorithm else ""
    form = "" if record.form == "blocking" else f"{record.form} "
    return (
        f"{form}{record.collective}{by} (call #{node.sequence} on {group}, {short(record.site)})"
    )


def ended(scene: Scene, rank: int, record: Record) -> float:
    """Return the wall clock at which a call ended."""
    return scene.dumps[rank].wall_of(record.end)


def idle_since(scene: Scene, rank: int) -> float:
    """Return the wall clock at which the last call of a rank ended, if it made one."""
    last = scene.last(rank)
    return ended(scene, rank, last) if last else scene.dumps[rank].joined


def present(scene: Scene, rank: int) -> str:
    """Return the line at which a rank is and its function, "" where its dump does not say."""
    own = next((frame for frame in scene.dumps[rank].stack if not frame.ours), None)
    return f"{short(f'{own.file}:{own.line}')} in {own.function}" if own else ""


def who(ranks: str | Sequence[int]) -> str:
    """Return ``Rank 3`` or ``Ranks 0-3, 5``."""
    text = ranks if isinstance(ranks, str) else spans(ranks)
    return f"{'Rank' if text.isdigit() else 'Ranks'} {text}"


def listed(names: Sequence[str]) -> str:
    """Return names as ``a, b and c``."""
    return f"{', '.join(names[:-1])} and {names[-1]}"


def ago(seconds: float) -> str:
    """Return a span of time."""
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def spans(ranks: Iterable[int]) -> str:
    """Return growing numbers as ``0-3, 5, 6``."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    words = []
    for low, high in found:
        words += (
            [f"{low}-{high}"] if high > low + 1 else [str(one) for one in range(low, high + 1)]
        )
    return ", ".join(words)


def short(site: str) -> str:
    """Return a call site without its folders."""
    return os.path.basename(site) or "an unknown line"


def clock(wall: float) -> str:
    """Return a time of the wall clock here, with the day unless it is today."""
    try:
        now = time.localtime(wall)
    except (OSError, OverflowError, ValueError):
        return "an unknown time"  # of a clock that went wrong
    day = "" if now[:3] == time.localtime()[:3] else "%Y-%m-%d "
    return time.strftime(f"{day}%H:%M:%S", now)
