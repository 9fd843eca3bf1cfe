"""The replay against closed forms, against an independent one, and its short cuts against it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from mpicoll.algorithms import Algorithm, every, find
from mpicoll.errors import SettingError
from mpicoll.simulation import lockstep, symmetry
from mpicoll.simulation import schedules as schedules_module
from mpicoll.simulation.calibrate import Measured, Times, calibrated, node
from mpicoll.simulation.fabric import Fabric, Local, Network
from mpicoll.simulation.machine import TICK, Machine
from mpicoll.simulation.network import Dragonfly, Dragons, FatTree, Torus, balanced
from mpicoll.simulation.predict import Prepared, predict
from mpicoll.simulation.program import Line
from mpicoll.simulation.replay import replay
from mpicoll.simulation.schedules import LeftOutError, Schedules, all_lines, cut_of

ALGORITHMS = [pytest.param(one, id=f"{one.collective}-{one.name}") for one in every()]
PLAIN = Machine(overhead=1e-6, step=0.0, call=0.0, operation=0.0, gamma=1e-9, copy=0.0)
ODD = Machine(
    overhead=0.7e-6, step=0.3e-6, call=2e-6, operation=0.2e-6, gamma=0.3e-9, copy=0.1e-9,
    eager=1000, cores=2,
)  # fmt: skip
LOCAL = Local(0.3e-6, 7e9)
SIZES = (8, 1000, 65536, 1 << 20)


def flat(nodes: int, rate: float = 1e9) -> FatTree:
    """One switch."""
    return FatTree(nodes, nodes, rate, 2e-6, 0.1e-6)


def networks(nodes: int) -> list[Network]:
    found: list[Network] = [
        FatTree(nodes, 2, 3e9, 1e-6, 0.1e-6, 2.0),
        Torus(nodes, (2, 2, -(-nodes // 4)), 3e9, 1e-6, 0.1e-6),
        Dragonfly(nodes, Dragons(2, 2, 4), 3e9, 1e-6, 0.1e-6),
    ]
    return found


def fabrics(size: int, per_node: int) -> list[Fabric]:
    return [
        Fabric(size, per_node, network, 5e9, LOCAL) for network in networks(-(-size // per_node))
    ]


def seconds(algorithm: Algorithm, nbytes: int, fabric: Fabric, machine: Machine) -> float:
    return predict(algorithm, [nbytes], 0, fabric, machine, how="all").seconds[0]


# -- closed forms -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_recursive_doubling_has_its_textbook_time(size: int) -> None:
    fabric = Fabric(size, 1, flat(size), 1e9, LOCAL)
    rounds = size.bit_length() - 1
    # Per round: two overheads, the latency, the bytes on the wire, and their reduction.
    expected = rounds * (2 * 1e-6 + 2e-6 + 4096 * 1e-9 + 4096 * 1e-9)
    found = seconds(find("allreduce", "recursive_doubling"), 4096, fabric, PLAIN)
    assert abs(found - expected) <= 5 * rounds * TICK


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_ring_has_its_textbook_time(size: int) -> None:
    fabric = Fabric(size, 1, flat(size), 1e9, LOCAL)
    block = 840 * 8 / size
    hop = 2 * 1e-6 + 2e-6 + block * 1e-9
    expected = (size - 1) * (2 * hop + block * 1e-9)
    found = seconds(find("allreduce", "ring"), 840 * 8, fabric, PLAIN)
    assert abs(found - expected) <= 5 * 2 * size * TICK


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13])
def test_binomial_broadcast_is_as_deep_as_its_tree(size: int) -> None:
    fabric = Fabric(size, 1, flat(size), 1e9, LOCAL)
    machine = Machine(overhead=0.0, gamma=0.0, copy=0.0)
    found = seconds(find("bcast", "binomial"), 1000, fabric, machine)
    # A sender is free once its bytes are on the wire, so only arrivals cost the latency.
    depth = max(_arrival(place, size) for place in range(size))
    assert abs(found - depth) <= 20 * TICK


def _arrival(place: int, size: int, wire: float = 1e-6, late: float = 2e-6) -> float:
    """Return when a rank of the binomial tree has the message and has sent it on."""
    here = 0.0
    reach = 1 << (size - 1).bit_length()
    at = 0
    while at != place:
        reach >>= 1
        if at + reach < size:
            here += wire
            if place >= at + reach:
                at += reach
                here += late
    while reach > 1:
        reach >>= 1
        here += wire * (at + reach < size)
    return here


# -- contention ---------------------------------------------------------------------------


def transfers(fabric: Fabric, pairs: list[tuple[int, int, int]]) -> list[float]:
    source, target, units = (np.array(column) for column in zip(*pairs, strict=True))
    return fabric.transfer(source, target, units)[1].tolist()


def test_messages_of_a_node_share_its_ports() -> None:
    fabric = Fabric(8, 4, flat(2), 1e9, Local(0.0, 4e9))
    alone = transfers(fabric, [(0, 4, 100)])
    out = transfers(fabric, [(0, 4, 100), (1, 5, 100)])
    opposite = transfers(fabric, [(0, 4, 100), (5, 1, 100)])
    assert alone == opposite[:1] == [100 / 1e9]
    assert out == [200 / 1e9] * 2
    assert transfers(fabric, [(0, 1, 100), (2, 3, 100)]) == [200 / 4e9] * 2


def test_a_short_message_does_not_wait_for_all_of_a_long_one() -> None:
    fabric = Fabric(4, 2, flat(2), 1e9, LOCAL)
    assert transfers(fabric, [(0, 2, 100), (1, 3, 9900)]) == [200 / 1e9, 10000 / 1e9]


def test_oversubscription_slows_what_leaves_a_leaf() -> None:
    fabric = Fabric(4, 1, FatTree(4, 2, 1e9, 0.0, 0.0, 4.0), 1e9, LOCAL)
    assert transfers(fabric, [(0, 1, 100)]) == [100 / 1e9]
    assert transfers(fabric, [(0, 2, 100), (1, 3, 100)]) == [200 / 0.5e9] * 2


def test_torus_goes_the_short_way_dimension_by_dimension() -> None:
    torus = Torus(24, (4, 3, 2), 1e9, 1e-6, 1e-7)
    links, late = torus.routes(np.array([0, 0, 0]), np.array([3, 4 * 2, 1 + 4 + 12]))
    ways = [[int(link) for link in row if link >= 0] for row in links]
    # -x from node 0; -y from node 0; +x from 0, +y from 1, +z from 5.
    assert ways == [[24], [3 * 24], [0, 2 * 24 + 1, 4 * 24 + 5]]
    assert late == pytest.approx([1e-6, 1e-6, 1.2e-6], rel=1e-12)


@pytest.mark.parametrize("shape", [(5, 1, 1), (4, 3, 2), (3, 3, 3), (2, 2, 2)])
def test_torus_ways_arrive(shape: tuple[int, int, int]) -> None:
    nodes = shape[0] * shape[1] * shape[2]
    torus = Torus(nodes, shape, 1e9, 0.0, 1.0)
    strides = (1, shape[0], shape[0] * shape[1])
    source, target = np.divmod(np.arange(nodes * nodes), nodes)
    links, late = torus.routes(source, target)
    for row, one, other, seconds in zip(links, source, target, late, strict=True):
        here, hops = int(one), 0
        for link in row[row >= 0]:
            direction, node = divmod(int(link), nodes)
            axis, back = divmod(direction, 2)
            assert node == here
            place = here // strides[axis] % shape[axis]
            here += ((place + (-1 if back else 1)) % shape[axis] - place) * strides[axis]
            hops += 1
        assert here == other
        ways = [
            abs(int(one) // s % n - int(other) // s % n)
            for s, n in zip(strides, shape, strict=True)
        ]
        assert hops == sum(min(way, n - way) for way, n in zip(ways, shape, strict=True))
        assert seconds == max(hops - 1, 0)


def test_dragonfly_ways() -> None:
    shape = Dragons(2, 2, 1)  # groups of 4 nodes, 3 of them
    fly = Dragonfly(12, shape, 1e9, 1e-6, 1e-7)
    links, late = fly.routes(np.array([0, 0, 0, 0]), np.array([1, 2, 4, 8]))
    crossed = (links >= 0).sum(axis=1)
    assert crossed[0] == 0  # the same router
    assert crossed[1] == 1  # the other router of the group
    assert (crossed[2:] >= 1).all()
    assert (crossed <= 3).all()
    assert late == pytest.approx(1e-6 + 1e-7 * crossed, rel=1e-12)
    cables = links[2:, 1]
    assert len(set(cables.tolist())) == 2
    assert fly.rates[cables] == pytest.approx(1e9)


@pytest.mark.parametrize("nodes", [1, 2, 6, 7, 100, 16384])
def test_the_balanced_dragonfly_has_room(nodes: int) -> None:
    shape = balanced(nodes)
    most = shape.nodes * shape.routers * (shape.routers * shape.links + 1)
    assert most >= nodes
    assert (shape.routers, shape.links) == (2 * shape.nodes, shape.nodes)


@pytest.mark.parametrize("network", [0, 1, 2])
@pytest.mark.parametrize("shift", [1, 3, 9])
def test_folded_links_carry_what_all_of_them_do(network: int, shift: int) -> None:
    fabric = fabrics(64, 2)[network]
    assert fabric.period < 64
    ranks = np.arange(64)
    units = np.full(64, 5)
    latency, wire = fabric.transfer(ranks, (ranks + shift) % 64, units)
    few = ranks[: fabric.period]
    late, slow = fabric.transfer(
        few, (few + shift) % 64, units[: few.size], np.zeros(few.size, int), folded=True
    )
    assert (latency[: few.size] == late).all()
    assert (wire[: few.size] == slow).all()


@pytest.mark.parametrize("network", [0, 1, 2])
def test_folded_ports_meet_what_comes_from_several_periods(network: int) -> None:
    fabric = Fabric(128, 2, networks(64)[network], 1e8, LOCAL)  # slow ports
    period = fabric.period
    assert 3 * period <= 128
    ranks = np.arange(128)
    # All send to the first rank of a period: the odd ones of the second next, others of the next.
    targets = (ranks // period * period + (1 + ranks % 2) * period) % 128
    units = 1 + ranks % period % 3
    latency, wire = fabric.transfer(ranks, targets, units)
    late, slow = fabric.transfer(
        ranks[:period], targets[:period], units[:period], np.zeros(period, int), folded=True
    )
    assert (latency[:period] == late).all()
    assert (wire[:period] == slow).all()


# -- an independent replay ----------------------------------------------------------------


def slow_replay(
    lines: list[Line], fabric: Fabric, machine: Machine, scale: float
) -> list[Fraction]:
    """Replay with dictionaries and exact fractions, rank by rank; the model once more."""

    def exact(value: float) -> Fraction:
        return Fraction(round(value / TICK))

    size = len(lines)
    todo = [_steps(one) for one in lines]
    per_node = [rank // fabric.per_node for rank in range(size)]
    crowd = [per_node.count(at) for at in per_node]
    clocks = []
    for rank, one in enumerate(lines):
        stretch = max(1.0, crowd[rank] / machine.cores) if machine.cores else 1.0
        clocks.append(exact(machine.call) + exact(_work(one.after[0], machine, scale) * stretch))
    at = [0] * size
    open_sends: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    open_recvs: dict[tuple[int, int], list[int]] = {}
    state: list[dict[str, dict[int, Fraction]]] = [{} for _ in range(size)]
    begins = list(range(size))
    while begins:
        for rank in begins:
            if at[rank] == len(todo[rank]):
                continue
            sends, recvs, _, _ = todo[rank][at[rank]]
            state[rank] = {"sent": {}, "arrived": {}}
            for place, (peer, _) in enumerate(recvs):
                open_recvs.setdefault((peer, rank), []).append(place)
            for place, (peer, units) in enumerate(sends):
                open_sends.setdefault((rank, peer), []).append((place, units, rank))
        ready = []
        for pair, messages in open_sends.items():
            while messages and open_recvs.get(pair):
                place, units, _ = messages.pop(0)
                ready.append((*pair, place, open_recvs[pair].pop(0), units))
        if not ready:
            break
        busy = sorted({rank for one in ready for rank in one[:2]})
        stretch = {}
        for rank in busy:
            together = sum(per_node[other] == per_node[rank] for other in busy)
            stretch[rank] = max(1.0, together / machine.cores) if machine.cores else 1.0
        columns = [np.array([message[at] for message in ready]) for at in (0, 1, 4)]
        late, wire = fabric.transfer(*columns)
        for (source, target, place, slot, units), wait, slow in zip(
            ready, late, wire, strict=True
        ):
            start = clocks[source] + (place + 1) * exact(machine.overhead * stretch[source])
            if units * scale > machine.eager:
                start = max(start, clocks[target])
            state[source]["sent"][place] = start + exact(slow * scale)
            state[target]["arrived"][slot] = start + exact(slow * scale) + int(wait)
        begins = []
        for rank in busy:
            sends, recvs, during, after = todo[rank][at[rank]]
            sent, arrived = state[rank]["sent"], state[rank]["arrived"]
            if len(sent) < len(sends) or len(arrived) < len(recvs):
                continue
            each = exact(machine.overhead * stretch[rank])
            clock = clocks[rank] + len(sends) * each + exact(machine.step * stretch[rank])
            clock += exact(_work(during, machine, scale) * stretch[rank])
            for slot in range(len(recvs)):
                clock = max(clock, arrived[slot]) + each
            clock = max([clock, *sent.values()])
            clocks[rank] = clock + exact(_work(after, machine, scale) * stretch[rank])
            at[rank] += 1
            begins.append(rank)
    assert at == [len(steps) for steps in todo]
    return clocks


def _work(units: np.ndarray, machine: Machine, scale: float) -> float:
    each = units[0] * machine.gamma + units[1] * machine.copy
    return float(scale * each + units[2] * machine.operation)


def _steps(line: Line) -> list[tuple[list, list, np.ndarray, np.ndarray]]:
    found = []
    send = recv = 0
    for step, (sends, recvs) in enumerate(zip(line.sends, line.recvs, strict=True)):
        out = list(zip(line.send_peers, line.send_units, strict=True))[send : send + sends]
        come = list(zip(line.recv_peers, line.recv_units, strict=True))[recv : recv + recvs]
        found.append((out, come, line.during[step], line.after[step + 1]))
        send, recv = send + sends, recv + recvs
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_full_replay_is_the_model(algorithm: Algorithm, size: int) -> None:
    fabric = fabrics(size, 2)[0]
    for nbytes in (24, 100_000):
        lines, scale = all_lines(algorithm, nbytes, 20_000, size)
        program = schedules_module.joined(lines)
        found = replay(program, fabric, ODD, np.array([scale]))
        assert [Fraction(int(clock)) for clock in found[0]] == slow_replay(
            lines, fabric, ODD, scale
        )


# -- the short cuts -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 12, 32])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_short_cuts_give_the_same_ticks(algorithm: Algorithm, size: int) -> None:
    """Whatever way is taken by itself, the times are those of every message, bit for bit."""
    for fabric in fabrics(size, 2 if size > 2 else 1):
        usual = predict(algorithm, SIZES, 40_000, fabric, ODD)
        full = predict(algorithm, SIZES, 40_000, fabric, ODD, how="all")
        assert usual.seconds == full.seconds


LOCKSTEP = [
    ("allgather", "ring"),
    ("allgather", "neighbour_exchange"),
    ("allgather", "recursive_doubling"),
    ("allreduce", "ring"),
    ("allreduce", "recursive_doubling"),
    ("allreduce", "rabenseifner"),
    ("alltoall", "pairwise"),
    ("alltoall", "linear"),
    ("alltoall", "bruck"),
    ("barrier", "dissemination"),
    ("reduce_scatter", "ring"),
    ("reduce_scatter", "recursive_halving"),
]


@pytest.mark.parametrize(("collective", "name"), LOCKSTEP)
@pytest.mark.parametrize("network", [0, 1, 2])
def test_one_period_stands_for_all_ranks(collective: str, name: str, network: int) -> None:
    fabric = fabrics(64, 2)[network]
    assert fabric.period < 64
    algorithm = find(collective, name)
    sizes = (0,) if collective == "barrier" else SIZES
    found = predict(algorithm, sizes, 0, fabric, ODD, how="lockstep")
    assert found.how == ("lockstep",) * len(sizes)
    assert found.seconds == predict(algorithm, sizes, 0, fabric, ODD, how="all").seconds


def test_a_repeated_step_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    step = lockstep._Replay._step
    monkeypatch.setattr(lockstep._Replay, "_step", lambda *given: steps.append(1) or step(*given))
    fabric = fabrics(256, 2)[0]
    predict(find("allgather", "ring"), SIZES, 0, fabric, ODD, how="lockstep")
    assert 0 < len(steps) < 64 < 255


MERGED = [
    ("allgather", "bruck"),
    ("allgather", "circulant"),
    ("allreduce", "circulant"),
    ("allreduce", "direct"),
    ("allreduce", "gather"),
    ("reduce_scatter", "circulant"),
]


@pytest.mark.parametrize(("collective", "name"), MERGED)
@pytest.mark.parametrize("size", [5, 12, 32])
def test_merging_saves_no_more_than_it_leaves_out(collective: str, name: str, size: int) -> None:
    """A step is then shorter by an overhead at each end, and an operation, at most."""
    algorithm = find(collective, name)
    for fabric in fabrics(size, 1):
        merged = predict(algorithm, SIZES, 0, fabric, PLAIN, how="merged").seconds
        full = predict(algorithm, SIZES, 0, fabric, PLAIN, how="all").seconds
        steps = max(line.sends.size for line in all_lines(algorithm, 8, 0, size)[0])
        for fewer, all_of_it in zip(merged, full, strict=True):
            assert fewer <= all_of_it * (1 + 1e-12)
            assert all_of_it <= fewer + 2 * PLAIN.overhead * steps


@pytest.mark.parametrize(
    ("collective", "name"),
    [("bcast", "chain"), ("reduce", "chain"), ("scan", "linear"), ("exscan", "linear")],
)
@pytest.mark.parametrize("segment", [0, 40_000, 100_000])
def test_a_row_is_counted_on(collective: str, name: str, segment: int) -> None:
    algorithm = find(collective, name)
    for fabric in fabrics(256, 2)[:1]:
        found = predict(algorithm, SIZES[:3], segment, fabric, ODD, how="rows")
        assert set(found.how) == {"rows"}
        full = predict(algorithm, SIZES[:3], segment, fabric, ODD, how="all")
        assert found.seconds == full.seconds


def test_classes_of_a_tree_stand_for_all_ranks() -> None:
    for collective in ("bcast", "reduce", "gather", "scatter"):
        algorithm = find(collective, "binomial")
        for size in (32, 64, 100, 128):
            fabric = fabrics(size, 2)[0]
            full = predict(algorithm, SIZES, 0, fabric, ODD, how="all")
            assert predict(algorithm, SIZES, 0, fabric, ODD).seconds == full.seconds


def test_ranks_that_do_not_stand_for_all_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that was concluded wrongly has sends without receives, and is not used."""
    monkeypatch.setattr(symmetry, "ALL", 0)
    monkeypatch.setattr(symmetry, "_samples", lambda members, size: [])
    algorithm = find("bcast", "binomial")
    fabric = fabrics(24, 2)[0]
    found = predict(algorithm, SIZES, 0, fabric, ODD)
    assert found.how == ("all",) * len(SIZES)
    assert found.seconds == predict(algorithm, SIZES, 0, fabric, ODD, how="all").seconds


# -- sizes no machine has -----------------------------------------------------------------


def test_what_is_too_large_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = Fabric(1500, 1, flat(1500), 1e9, LOCAL)
    with pytest.raises(LeftOutError, match=r"all schedules would take about \d+ s to build"):
        predict(find("bcast", "circulant"), [8], 0, fabric, PLAIN, patience=0.0)
    monkeypatch.setattr(schedules_module, "MESSAGES", 1000)
    with pytest.raises(LeftOutError, match=r"saves replaying its .* messages"):
        predict(find("bcast", "binomial"), [8], 0, fabric, PLAIN)
    monkeypatch.setattr(schedules_module, "SPANS", 1000)
    with pytest.raises(LeftOutError, match="the schedule of one rank has about"):
        predict(find("scan", "direct"), [8], 0, fabric, PLAIN)
    with pytest.raises(LeftOutError, match="can not be replayed as 'lockstep'"):
        predict(find("bcast", "binomial"), [8], 0, fabrics(8, 1)[0], PLAIN, how="lockstep")


def test_a_ring_of_many_ranks_takes_its_textbook_time() -> None:
    size = 16384
    fabric = Fabric(size, 1, FatTree(size, 16, 1e9, 2e-6, 0.0), 1e9, LOCAL)
    found = predict(find("allgather", "ring"), [size * 1000], 0, fabric, PLAIN)
    assert found.how == ("lockstep",)
    hop = 2 * 1e-6 + 2e-6 + 1000 * 1e-9
    assert found.seconds[0] == pytest.approx((size - 1) * hop, rel=1e-6)


# -- calibration --------------------------------------------------------------------------


def test_calibration_finds_what_made_the_times() -> None:
    """Times of one machine at some sizes give those of it at others."""
    values = np.array([21e-6, 3e-6, 4e-6, 7e-6, 0.2e-9, 0.15e-9, 5e-6, 0.4e-9])
    hidden = node(values, cores=2)
    cases = [
        Measured(find(collective, name), nbytes, 0, 1.0)
        for collective, name in [*LOCKSTEP[3:6], ("bcast", "binomial"), ("alltoall", "linear")]
        for nbytes in (64, 512, 4096, 32768, 1 << 18)
    ]
    times = Times(cases, 4)(hidden)
    known = [
        Measured(case.algorithm, case.nbytes, 0, float(seconds))
        for case, seconds in zip(cases, times, strict=True)
        if case.nbytes not in (512, 32768)
    ]
    found = Times(cases, 4)(calibrated(known, 4, cores=2))
    assert np.abs(np.log(found / times)).max() < 0.05


def test_calibration_wants_two_sizes() -> None:
    one = Measured(find("allreduce", "ring"), 64, 0, 1e-5)
    with pytest.raises(SettingError, match="two sizes at least"):
        calibrated([one], 4, 2)


def test_schedules_are_kept_between_runs() -> None:
    prepared = Prepared(find("allreduce", "ring"), SIZES, 0, 8)
    fabric = fabrics(8, 2)[0]
    first = prepared.run(fabric, PLAIN)
    assert prepared.run(fabric, ODD) != first
    assert prepared.run(fabric, PLAIN) == first


def test_segments_are_counted_in_blocks_or_vectors() -> None:
    ring, chain = find("allreduce", "ring"), find("bcast", "chain")
    assert cut_of(ring, 8000, 250, 8).pieces == 4
    assert cut_of(chain, 8000, 250, 8).pieces == 32
    assert cut_of(find("allreduce", "circulant"), 8000, 250, 8).pieces == 1
    assert Schedules(chain, 8, cut_of(chain, 8000, 250, 8)).pieces == 32
