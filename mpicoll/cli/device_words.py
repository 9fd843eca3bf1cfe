"""Words for the devices of all ranks: the map, and what is wrong with it. Loads no MPI."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mpicoll.cli.common import human_bytes
from mpicoll.cli.devices import RULE, Device, Node, Place, Pointers
from mpicoll.cli.flight_words import spans

NODES = 8  #: kinds of nodes that are shown one by one
_LONG = 8  #: words of a list that are shown


# -- the map ------------------------------------------------------------------------------


def lines(nodes: Sequence[Node]) -> list[str]:
    """Return the map: the devices of the nodes, who sees and who uses them.

    Nodes of which the same is to be said are put together, so ranks are local ones.
    """
    kinds: dict[tuple[str, ...], list[str]] = {}
    for node in nodes:
        kinds.setdefault(tuple(_node(node)), []).append(node.name)
    some = any(node.devices for node in nodes)
    found = []
    for (first, *rest), names in list(kinds.items())[:NODES]:
        more = f" and {len(names) - 1} more like it" if len(names) > 1 else ""
        found.append(f"{names[0]}{more}: {first}" if some or len(kinds) > 1 else first)
        found += [f"  {line}" for line in rest]
    if len(kinds) > NODES:
        left = sum(map(len, list(kinds.values())[NODES:]))
        found.append(f"and {left} more nodes")
    if some:
        found.append(f"mpicoll.bind_device(): {RULE}")
    return found


def pointer_lines(found: Sequence[Pointers]) -> list[str]:
    """Return whether device pointers go to the MPI, by ranks where that differs."""
    words = []
    for one in found:
        text = f"{one.answer}{' yet' * (one.answer == 'not tried')}: {one.why}"
        if one.signs:
            text += f"; what speaks for it: {', '.join(one.signs)}"
        words.append(f"{_ranks(one.ranks)}: {text}" if len(found) > 1 else text)
    return words


def _node(node: Node) -> Iterator[str]:
    """Yield what is to be said of one node."""
    blind: dict[str, list[Place]] = {}
    current: dict[str, list[Place]] = {}
    for place in node.places:
        if place.seen.current is None:
            blind.setdefault(place.seen.why, []).append(place)
        else:
            current.setdefault(str(place.seen.current), []).append(place)
    if not node.devices:
        yield f"none seen ({_by(blind)})"
    else:
        who = ", seen alike by all ranks" if node.alike else ", ranks see different ones"
        yield _count(len(node.devices), "device") + who * (len(node.places) > 1)
        for number, device in enumerate(node.devices):
            yield f"{number}: " * node.alike + _device(node, device)
        for why, places in blind.items():
            yield f"{_local(places)}: none seen ({why})"
        yield f"current before mpicoll.bind_device(): device {_by(current)}"
    for name in dict.fromkeys(name for place in node.places for name in place.variables):
        values: dict[str, list[Place]] = {}
        for place in node.places:
            values.setdefault(place.variables.get(name, "not set"), []).append(place)
        yield f"{name}{'=' if len(values) == 1 else ': '}{_by(values)}"


def _device(node: Node, device: Device) -> str:
    users, seers = node.users(device), node.seers(device)
    text = f"{device.name}, {device.bus}, {human_bytes(device.memory)}: "
    text += f"for {_local(users)}" if users else "idle"
    return text if len(seers) == len(node.places) else f"{text}; seen by {_local(seers)}"


def _by(groups: Mapping[str, Sequence[Place]]) -> str:
    """Return what the ranks have: one word, or each word with the ranks that have it."""
    if len(groups) == 1:
        return next(iter(groups))
    return _listed([f"{word or 'empty'} ({_local(places)})" for word, places in groups.items()])


def _local(places: Iterable[Place]) -> str:
    return _named("local rank", [place.local for place in places])


def _ranks(ranks: Iterable[int]) -> str:
    return _named("rank", list(ranks))


def _named(word: str, ranks: list[int]) -> str:
    """Return ``rank 3``, ``ranks 0-3, 5``, or the first of many."""
    words = spans(sorted(ranks)).split(", ")
    more = f", … ({len(ranks)} of them)" if len(words) > _LONG else ""
    return f"{word}{'s' * (len(ranks) > 1)} {', '.join(words[:_LONG])}{more}"


def _listed(words: Sequence[str]) -> str:
    more = [f"and {len(words) - _LONG} more"] if len(words) > _LONG else []
    return ", ".join([*words[:_LONG], *more])


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


# -- what is wrong ------------------------------------------------------------------------


def warnings(nodes: Sequence[Node], setting: str = "") -> list[str]:
    """Return what makes device memory slow to reach, or unsafe.

    ``setting`` is MPICOLL_CUDA_AWARE.
    """
    places = [place for node in nodes for place in node.places]
    found = [*_variables(nodes), *_hidden(nodes), *_crowded(nodes), *_uneven(places)]
    if pooled := [place.rank for place in places if place.seen.pooled]:
        found.append(
            f"CuPy of {_ranks(pooled)} takes memory from an asynchronous pool (MemoryAsyncPool or "
            "cupy.cuda.malloc_async), which can not be shared by IPC; CuPy's own pool can"
        )
    failed = [place.rank for place in places if place.seen.devices and place.kept is False]
    if setting == "1" and failed:
        found.append(
            f"MPICOLL_CUDA_AWARE=1, but a trial on the host of {_ranks(failed)} has failed: this "
            "MPI may crash on device pointers; without the variable they go through the host"
        )
    return found


def notes(nodes: Sequence[Node], setting: str = "") -> list[str]:
    """Return what is good to know where there are devices."""
    places = [place for node in nodes for place in node.places if place.seen.devices]
    found = []
    if untold := [place.rank for place in places if not place.told]:
        found.append(
            f"no launcher says the local rank of {_ranks(untold)}: there, bind_device needs a "
            "communicator: mpicoll.bind_device(comm)"
        )
    unsigned = [place.rank for place in places if not place.signs]
    if setting == "1" and unsigned:
        found.append(
            f"MPICOLL_CUDA_AWARE=1, and nothing else says so on {_ranks(unsigned)}: an MPI that "
            "does not take device pointers crashes on them"
        )
    return found


def _variables(nodes: Iterable[Node]) -> Iterator[str]:
    """Yield what variables break, once for all ranks and values."""
    found: dict[tuple[str, str], dict[str, list[int]]] = {}
    for node in nodes:
        # Where all see the same devices, nobody is bound, whatever the variables say.
        unbound = bool(node.devices) and node.shared
        for place in node.places:
            for one in place.obstacles:
                if not (one.binds and unbound):
                    values = found.setdefault((one.variable, one.why), {})
                    values.setdefault(one.value, []).append(place.rank)
    for (variable, why), values in found.items():
        words = [f"{value} ({_ranks(ranks)})" for value, ranks in values.items()]
        yield f"{variable}={_listed(words)} {why}"


def _hidden(nodes: Iterable[Node]) -> Iterator[str]:
    """Yield what no variable told: ranks of a node see different devices, as many each."""
    names = [
        node.name
        for node in nodes
        if not node.shared
        and len({len(place.seen.devices) for place in node.places}) == 1
        and not any(one.binds for place in node.places for one in place.obstacles)
    ]
    if names:
        yield (
            f"ranks of one node see different devices (on {_listed(names)}): they can not map "
            "each other's memory; let the launcher show all devices to all ranks"
        )


def _crowded(nodes: Iterable[Node]) -> Iterator[str]:
    """Yield where ranks share a device while another is idle."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        idle = [device for device in node.devices if not node.users(device)]
        for device in node.devices:
            users = node.users(device)
            if idle and len(users) > 1:
                found.setdefault(_remedy(node, users), []).append(
                    f"{_ranks(place.rank for place in users)} share device {device.bus} of "
                    f"{node.name}, where {_count(len(idle), 'device')} "
                    f"{'is' if len(idle) == 1 else 'are'} idle"
                )
    for remedy, words in found.items():
        more = f" (and so on, {len(words)} devices)" if len(words) > 1 else ""
        yield f"{words[0]}{more}: {remedy}"


def _remedy(node: Node, users: Sequence[Place]) -> str:
    """Say why ranks share a device, and what to do."""
    if len({place.local for place in users}) < len(users):
        return "the launcher gives them the same local rank; call mpicoll.bind_device(comm)"
    if node.shared:
        return "they see the devices in different orders; show them in one order to all ranks"
    return "show all devices to all ranks"


def _uneven(places: Iterable[Place]) -> Iterator[str]:
    """Yield that ranks see different numbers of devices."""
    counts: dict[int, list[int]] = {}
    for place in places:
        counts.setdefault(len(place.seen.devices), []).append(place.rank)
    if len(counts) > 1:
        words = [f"{count} ({_ranks(ranks)})" for count, ranks in sorted(counts.items())]
        yield (
            f"ranks see different numbers of devices: {_listed(words)}; ranks that see few share "
            "those, and not all can map each other's memory; show all devices to all ranks"
        )
