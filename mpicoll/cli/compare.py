"""`mpicoll explain --algorithm all`: the algorithms of one collective side by side."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from mpicoll.algorithms import find, names
from mpicoll.cli import plans
from mpicoll.cli.common import human_bytes, human_seconds
from mpicoll.schedule.contracts import REDUCTIONS
from mpicoll.schedule.cost import Machine

TIMED_RANKS = 512  #: ranks up to which times are predicted
SIZES = (8, 8 << 10, 256 << 10, 8 << 20)


def model(machine: Machine) -> str:
    """Return the parameters of the model in words."""
    return (
        f"(α {machine.alpha * 1e6:g} µs a step, β {machine.beta * 1e9:g} ns/B on the wire, "
        f"γ {machine.gamma * 1e9:g} ns/B reduced; no contention)"
    )


def compare(
    screen: Console, collective: str, ranks: int, machine: Machine, chosen: str
) -> dict[str, Any]:
    """Show steps, bytes, predicted times and order of all algorithms; return them."""
    nbytes = 1 << 20
    screen.print(f"[bold]{collective}, {ranks} ranks[/bold]: {plans.DOES[collective]}\n")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("algorithm", no_wrap=True)
    for head in ("steps", "messages", "sent, of N"):
        table.add_column(head, justify="right")
    for size in SIZES:
        table.add_column(human_bytes(size), justify="right")
    if collective in REDUCTIONS:
        table.add_column("order")
    rows = []
    times = {
        name: [plans.timed(find(collective, name), ranks, size, machine) for size in SIZES]
        for name in names(collective)
        if ranks <= TIMED_RANKS
    }
    for name in names(collective):
        algorithm = find(collective, name)
        counted = plans.most(plans.build(algorithm, ranks, nbytes), 1)
        share = 0.0 if collective == "barrier" else counted["bytes_sent"] / nbytes
        cells = [
            f"[bold green]{human_seconds(seconds)}[/]"
            if seconds <= 1.0001 * min(times[other][at] for other in times)
            else human_seconds(seconds)
            for at, seconds in enumerate(times.get(name, []))
        ] or ["—"] * len(SIZES)
        order = [algorithm.order] if collective in REDUCTIONS else []
        table.add_row(
            name, str(counted["steps"]), str(counted["messages"]), f"{share:.3g}", *cells, *order
        )
        rows.append(
            {
                "algorithm": name,
                "summary": algorithm.summary,
                "order": algorithm.order,
                **counted,
                "predicted_seconds": dict(zip(map(str, SIZES), times.get(name, []), strict=False)),
            }
        )
    screen.print(table)
    screen.print(
        f"\n[dim]Most of any rank. Times are predicted {model(machine)}; segments as the "
        "automatic choice has them.[/dim]\n"
    )
    for name in names(collective):
        screen.print(f"[bold]{name}[/bold]: {find(collective, name).summary}")
    screen.print()
    return {"collective": collective, "ranks": ranks, "algorithms": rows, "automatic": chosen}
