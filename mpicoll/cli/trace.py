"""`mpicoll trace`: who waited for whom, from the timelines that MPICOLL_TRACE wrote."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from mpicoll.cli import launch
from mpicoll.cli.common import console, fault_of, json_option, refuse, write_json
from mpicoll.cli.timeline import TraceError, read
from mpicoll.cli.timeline_facts import analyse
from mpicoll.cli.trace_report import show

MERGED = "trace.json"


class Window(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Seconds FROM:TO, either may be left out."""

    name = "window"

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> Any:
        """Return (low, high)."""
        if isinstance(value, tuple):
            return value
        low, colon, high = str(value).partition(":")
        try:
            found = float(low or 0), float(high or "inf")
        except ValueError:
            found = (0.0, -1.0)
        if not colon or not 0 <= found[0] < found[1]:
            self.fail(f"{value!r}: expected FROM:TO in seconds, as 1.5:2 or 10:", param, ctx)
        return found


@click.command()
@click.argument("folder", metavar="DIR")
@click.option(
    "--window",
    default=":",
    type=Window(),
    metavar="FROM:TO",
    help="Only these seconds of the trace, in tables and pictures.",
)
@click.option(
    "--top",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="Pairs and ranks that are shown.",
)
@click.option("--png", metavar="FILE", help="Draw the timeline (png: mpicoll[plot]).")
@click.option(
    "--out",
    metavar="FILE",
    help=f"Where the merged trace goes.  [default: DIR/{MERGED}]",
)
@json_option
def trace(
    folder: str,
    window: tuple[float, float],
    top: int,
    png: str | None,
    out: str | None,
    json_file: str | None,
) -> None:
    """Merge the timelines of all ranks, and say who waited for whom. Starts no MPI.

    \b
      MPICOLL_TRACE=t mpiexec -n 8 python train.py      take a trace: one file per rank in t
      mpicoll trace t                                   tables, and t/trace.json for
                                                        ui.perfetto.dev or chrome://tracing
      mpicoll trace t --window 1.5:1.6 --png t.png      a picture of a tenth of a second

    \b
    late     waiting for a rank that had not yet called the collective
    busy     waiting for a rank at work between its messages
    moving   waiting while the messages were under way
    hidden   what of a non-blocking collective's time was not spent in its Wait

    Clock offsets between ranks, and their drift, are estimated by the trace and removed. Phases
    of your own show where the program says: with mpicoll.trace_region("forward"): ...
    """
    if not launch.speaks():
        return  # one process reads, and says what is wrong
    place = Path(folder)
    merged = place / MERGED if out is None else Path(out)
    _refuse(place, merged, png, json_file)
    low, high = window
    try:
        whole = read(place)
    except TraceError as error:
        raise click.UsageError(str(error)) from None
    if low >= whole.seconds > 0:
        refuse(f"--window begins at {low:g} s, the trace has {whole.seconds:.6g} s")
    timeline = whole if window == (0, float("inf")) else whole.window(low, high)
    report = analyse(timeline)
    screen = console(json_file)
    show(screen, report, top)
    from mpicoll.cli.timeline_events import write

    count = write(timeline, merged)
    screen.print(f"{merged}: {count} events; open it with ui.perfetto.dev or chrome://tracing")
    if png is not None:
        from mpicoll.cli.timeline_plot import draw

        draw(timeline, report, Path(png), low, min(high, whole.seconds))
        screen.print(f"{png}: the timeline")
    write_json(json_file, "trace", report)


def _refuse(folder: Path, merged: Path, png: str | None, json_file: str | None) -> None:
    """Say what is wrong with the arguments."""
    if not folder.is_dir():
        what = "is a file, expected the folder of a trace" if folder.exists() else "does not exist"
        refuse(f"{folder} {what}; take a trace with MPICOLL_TRACE={folder}")
    if not os.access(folder, os.R_OK | os.X_OK):
        refuse(f"{folder} can not be read")
    fault = fault_of(str(merged))
    refuse(f"{fault}; name another with --out FILE" if fault else "")
    refuse(fault_of(png) or fault_of(json_file))
    if png is not None:
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            refuse("--png needs Matplotlib: pip install 'mpicoll[plot]'")
