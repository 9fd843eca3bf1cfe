"""A second opinion: the same schedules replayed by SimGrid, which shares links its own way.

SimGrid has one simulation per process, so each replay runs in a process of its own, this
module started with a job on its standard input. Only latencies, links and the work on each
rank are described; how bandwidth is shared, and when, is SimGrid's model (max-min fairness
at every moment), without its correction factors for TCP.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicoll.algorithms import Algorithm
from mpicoll.errors import MpicollError
from mpicoll.simulation.fabric import Fabric
from mpicoll.simulation.machine import Machine
from mpicoll.simulation.program import Line
from mpicoll.simulation.schedules import all_lines

RANKS = 128  #: at most: every pair of nodes gets a route, every rank a thread
ADVICE = (
    "Debian and Ubuntu have it as python3-simgrid, for the system's Python: make the venv with "
    "--system-site-packages"
)


def fault(ranks: int) -> str:
    """Return why SimGrid can not be asked, or an empty string."""
    if importlib.util.find_spec("simgrid") is None:
        return f"--engine simgrid: there is no module simgrid for this Python. {ADVICE}"
    if ranks > RANKS:
        return f"--engine simgrid: {ranks} ranks, at most {RANKS} are taken"
    return ""


def seconds(
    algorithm: Algorithm, sizes: Sequence[int], segment: int, fabric: Fabric, machine: Machine
) -> list[float]:
    """Return the time SimGrid predicts for each size."""
    platform = _platform(fabric)
    found = []
    for nbytes in sizes:
        lines, scale = all_lines(algorithm, nbytes, segment, fabric.size)
        actors = [_actor(line, scale, machine) for line in lines]
        job = {**platform, "actors": actors, "overhead": machine.overhead, "eager": machine.eager}
        found.append(_run(job) + machine.call)
    return found


def _platform(fabric: Fabric) -> dict[str, Any]:
    """Return where ranks are, the rates of links, and links and latency between nodes."""
    hosts = fabric.node(np.arange(fabric.size))
    nodes = int(hosts[-1]) + 1
    ends = np.divmod(np.arange(nodes * nodes), nodes)
    links, latency = fabric.ways(*ends)
    return {
        "hosts": hosts.tolist(),
        "rates": np.minimum(fabric.rates, 1e30).tolist(),
        "ways": [
            [int(one), int(other), [int(link) for link in way if link >= 0], float(late)]
            for one, other, way, late in zip(*ends, links, latency, strict=True)
        ],
    }


def _actor(line: Line, scale: float, machine: Machine) -> dict[str, Any]:
    """Return what a rank does: seconds, and [peer, bytes] of messages."""
    one = np.array([scale])
    after = machine.work(line.after, one)[0]
    during = machine.work(line.during, one)[0] + machine.step
    sends, recvs = (
        np.split(
            np.stack([peers, np.maximum(1, np.rint(units * scale))], 1).astype(int),
            np.cumsum(counts)[:-1],
        )
        for peers, units, counts in (
            (line.send_peers, line.send_units, line.sends),
            (line.recv_peers, line.recv_units, line.recvs),
        )
    )
    steps = zip(sends, recvs, during.tolist(), after[1:].tolist(), strict=True)
    return {
        "before": float(after[0]),
        "steps": [[out.tolist(), come.tolist(), *work] for out, come, *work in steps]
        if line.sends.size
        else [],
    }


def _run(job: dict[str, Any]) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "mpicoll.simulation.simgrid"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MpicollError(f"SimGrid failed: {done.stderr.strip()[-2000:]}")
    return float(done.stdout.split()[-1])


def _simulate(job: dict[str, Any]) -> float:
    """Run a job in SimGrid; once in a process."""
    import simgrid  # type: ignore[import-not-found, unused-ignore]

    engine = simgrid.Engine(
        [
            "mpicoll",
            "--log=root.threshold:critical",
            "--cfg=network/model:CM02",
            "--cfg=network/TCP-gamma:0",
            "--cfg=network/crosstraffic:0",
        ]
    )
    zone = simgrid.NetZone.create_full_zone("zone")
    hosts = [zone.create_host(f"n{at}", 1e9).seal() for at in range(job["hosts"][-1] + 1)]
    links = [zone.create_link(f"l{at}", rate).seal() for at, rate in enumerate(job["rates"])]
    for at, (one, other, way, late) in enumerate(job["ways"]):
        wait = zone.create_link(f"w{at}", 1e30)
        wait.set_latency(late)
        route = [simgrid.LinkInRoute(link) for link in [*(links[k] for k in way), wait.seal()]]
        ends = hosts[one].netpoint, hosts[other].netpoint
        zone.add_route(*ends, None, None, route, False)
    zone.seal()
    eager, overhead = job["eager"], job["overhead"]

    def box(source: int, target: int, nbytes: int) -> Any:
        kind = "short" if nbytes <= eager else "long"
        return simgrid.Mailbox.by_name(f"{kind} {source} {target}")

    def rank(me: int, before: float, steps: list[Any]) -> None:
        # A mailbox with a receiver takes messages before they are asked for.
        for source in {peer for _, recvs, *_ in steps for peer, _ in recvs}:
            box(source, me, 0).set_receiver(simgrid.Actor.self())
        simgrid.this_actor.sleep_for(before)
        for sends, recvs, during, after in steps:
            # What a receive is put into has to live until it is there.
            gets = [box(peer, me, nbytes).get_async() for peer, nbytes in recvs]
            waits = [comm for comm, _ in gets]
            for peer, nbytes in sends:
                simgrid.this_actor.sleep_for(overhead)
                waits.append(box(me, peer, nbytes).put_async(nbytes, nbytes))
            simgrid.this_actor.sleep_for(during)
            simgrid.Comm.wait_all(waits)
            simgrid.this_actor.sleep_for(overhead * len(recvs) + after)

    for me, actor in enumerate(job["actors"]):
        host = hosts[job["hosts"][me]]
        simgrid.Actor.create(f"r{me}", host, rank, me, actor["before"], actor["steps"])
    engine.run()
    return float(engine.clock)


if __name__ == "__main__":
    print(repr(_simulate(json.load(sys.stdin))))
