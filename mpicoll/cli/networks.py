"""Options of the command line that describe a network, and what they make."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from mpicoll.cli.common import refuse
from mpicoll.errors import SettingError
from mpicoll.simulation import netfile
from mpicoll.simulation.fabric import Fabric, Local, Network
from mpicoll.simulation.machine import Machine
from mpicoll.simulation.network import Dragonfly, Dragons, FatTree, Torus, balanced

KINDS = ("fat-tree", "torus", "dragonfly")
PLACES = 1 << 22  #: of a torus
LONGEST = 4096  #: links that a message passes on one
LINKS = 1 << 26  #: of a dragonfly
_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--network",
        default="fat-tree",
        show_default=True,
        metavar="KIND",
        help="fat-tree, torus, dragonfly, or a JSON file.",
    ),
    click.option("--latency", default=1.0, show_default=True, help="µs from node to node."),
    click.option("--bandwidth", default=25.0, show_default=True, help="GB/s of a port or link."),
    click.option(
        "--ranks-per-node", default=1, type=click.IntRange(1), show_default=True, metavar="N"
    ),
    click.option(
        "--hop-latency", default=0.1, show_default=True, help="µs per switch after the first."
    ),
    click.option("--local-latency", default=0.3, show_default=True, help="µs within a node."),
    click.option(
        "--local-bandwidth",
        default=50.0,
        show_default=True,
        help="GB/s of a node's memory, that its ranks share.",
    ),
    click.option(
        "--leaf",
        default=16,
        type=click.IntRange(1),
        show_default=True,
        help="Fat tree: nodes per leaf switch.",
    ),
    click.option(
        "--oversubscription", default=1.0, show_default=True, help="Fat tree: nodes' to uplinks'."
    ),
    click.option("--torus", "shape", metavar="XxYxZ", help="Torus.  [default: near a cube]"),
    click.option(
        "--dragonfly",
        "dragons",
        metavar="P,A,H",
        help="Nodes per router, routers per group, global links per router.  [default: the "
        "smallest balanced one]",
    ),
)


def options(command: _Command) -> _Command:
    """Add the options of a network."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def fabric(ranks: int, given: dict[str, Any]) -> Fabric:
    """Return the ranks on the network that was asked for; say what is wrong with it."""
    for name in ("latency", "hop_latency", "local_latency"):
        value = given[name]
        option = "--" + name.replace("_", "-")
        refuse("" if 0 <= value < 1e9 else f"{option} {value:g}, expected 0 or more µs")
    for name in ("bandwidth", "local_bandwidth"):
        value = given[name]
        option = "--" + name.replace("_", "-")
        refuse("" if 0 < value < 1e9 else f"{option} {value:g}, expected more than 0 GB/s")
    over = given["oversubscription"]
    refuse("" if 0 < over < 1e9 else f"--oversubscription {over:g}, expected more than 0")
    per_node = min(given["ranks_per_node"], ranks)
    local = Local(given["local_latency"] * 1e-6, given["local_bandwidth"] * 1e9)
    made = _network(-(-ranks // per_node), given)
    # The ports of a graph's nodes are its links.
    port = math.inf if isinstance(made, netfile.Graph) else given["bandwidth"] * 1e9
    return Fabric(ranks, per_node, made, port, local)


def _network(nodes: int, given: dict[str, Any]) -> Network:
    kind = given["network"]
    rate, late = given["bandwidth"] * 1e9, given["latency"] * 1e-6
    hop = given["hop_latency"] * 1e-6
    if kind == "fat-tree":
        return FatTree(
            nodes, min(given["leaf"], nodes), rate, late, hop, given["oversubscription"]
        )
    if kind == "torus":
        return Torus(nodes, _shape(given["shape"], nodes), rate, late, hop)
    if kind == "dragonfly":
        return Dragonfly(nodes, _dragons(given["dragons"], nodes), rate, late, hop)
    if not kind.endswith(".json"):
        refuse(f"--network {kind}: expected {', '.join(KINDS)}, or the name of a .json file")
    try:
        graph = netfile.read(kind, rate, late)
    except SettingError as error:
        raise click.UsageError(str(error)) from None
    refuse(
        f"{kind} has {graph.nodes} nodes, and the ranks need {nodes}; more --ranks-per-node?"
        if graph.nodes < nodes
        else ""
    )
    return graph


def _whole(text: str, parts: str, option: str, form: str) -> tuple[int, ...]:
    """Return the three whole numbers of a text."""
    words = text.lower().split(parts)
    if len(words) != 3 or not all(word.isdecimal() and int(word) > 0 for word in words):
        refuse(f"{option} {text}: expected {form}, whole numbers")
    return tuple(int(word) for word in words)


def _shape(text: str | None, nodes: int) -> tuple[int, int, int]:
    if text is None:
        shape = near_cube(nodes)
        return shape if _ways(shape) <= LONGEST else roomy(nodes)
    x, y, z = _whole(text, "x", "--torus", "XxYxZ")
    refuse(f"--torus {text} has {x * y * z} places for {nodes} nodes" if x * y * z < nodes else "")
    refuse(
        f"--torus {text}: {x * y * z} places, at most {PLACES} are taken"
        if x * y * z > PLACES
        else ""
    )
    refuse(
        f"--torus {text}: messages pass up to {_ways((x, y, z))} links, at most {LONGEST} are "
        "taken; nearer to a cube?"
        if _ways((x, y, z)) > LONGEST
        else ""
    )
    return x, y, z


def _ways(shape: tuple[int, int, int]) -> int:
    """Return how many links messages pass on a torus, at most."""
    return sum(length // 2 for length in shape)


def roomy(nodes: int) -> tuple[int, int, int]:
    """Return a shape near a cube with a place for every node, and some that are left empty."""
    x = next(x for x in range(1, nodes + 1) if x**3 >= nodes)
    y = next(y for y in range(1, x + 1) if x * y * x >= nodes)
    return x, y, -(-nodes // (x * y))


def near_cube(nodes: int) -> tuple[int, int, int]:
    """Return three lengths with this product, the longest as short as can be, and first."""
    best = (nodes, 1, 1)
    for z in range(1, round(nodes ** (1 / 3)) + 1):
        if nodes % z == 0:
            rest = nodes // z
            y = next(y for y in range(math.isqrt(rest), 0, -1) if rest % y == 0)
            if rest // y < best[0] and y >= z:
                best = (rest // y, y, z)
    return best


def _dragons(text: str | None, nodes: int) -> Dragons:
    if text is None:
        return balanced(nodes)
    shape = Dragons(*_whole(text, ",", "--dragonfly", "P,A,H"))
    groups = -(-nodes // (shape.nodes * shape.routers))
    most = shape.routers * shape.links + 1
    refuse(
        f"--dragonfly {text}: {nodes} nodes need {groups} groups, and a group's "
        f"{most - 1} global links join {most} at most"
        if groups > most
        else ""
    )
    links = groups * shape.routers**2 + groups**2
    refuse(
        f"--dragonfly {text}: {links:.2g} links, at most {LINKS} are taken"
        if links > LINKS
        else ""
    )
    return shape


def described(fabric: Fabric, given: dict[str, Any], machine: Machine) -> str:
    """Return the machine in words."""
    nodes = -(-fabric.size // fabric.per_node)
    cores = f", {machine.cores} cores a node" if machine.cores else ""
    return (
        f"{fabric.size} ranks on {nodes} node{'s' * (nodes != 1)}: {fabric.network}\n"
        f"[dim]latency {given['latency']:g} µs (+ {given['hop_latency']:g} a hop), "
        f"{given['bandwidth']:g} GB/s; within a node {given['local_latency']:g} µs, "
        f"{given['local_bandwidth']:g} GB/s; overhead {machine.overhead * 1e6:g} µs, "
        f"γ {machine.gamma * 1e9:g} ns/B{cores}[/dim]"
    )
