"""The full replay: every rank, every message, level by level, many sizes at a time."""

from __future__ import annotations

import numpy as np

from mpicoll.errors import ScheduleError
from mpicoll.simulation.fabric import Fabric
from mpicoll.simulation.machine import Integers, Machine, Reals, ticks
from mpicoll.simulation.program import Program


def replay(program: Program, fabric: Fabric, machine: Machine, scales: Reals) -> Integers:
    """Return when each rank is done, in ticks, (sizes, ranks); ``scales`` are bytes per unit.

    Memory is two integers per message and size.
    """
    return _Replay(program, fabric, machine, scales).run()


def _ranges(first: Integers, last: Integers) -> Integers:
    """Return all whole numbers of some ranges, one after the other."""
    counts = last - first
    starts = np.repeat(first - np.cumsum(counts) + counts, counts)
    result: Integers = starts + np.arange(starts.size)
    return result


class _Replay:
    def __init__(self, program: Program, fabric: Fabric, machine: Machine, scales: Reals) -> None:
        self.program, self.fabric, self.machine, self.scales = program, fabric, machine, scales
        messages = program.source.size
        self.steps = program.first[:-1].copy()
        self.missing = np.zeros(program.size, np.int64)
        self.sent = np.zeros((scales.size, messages), np.int64)
        self.arrived = np.zeros((scales.size, messages), np.int64)
        self.posted_sends = np.zeros(messages, bool)
        self.posted_recvs = np.zeros(messages, bool)
        # A message's place among the sends of its step.
        counts = np.diff(program.send_first)
        self.place = _ranges(np.zeros_like(counts), counts)
        start = machine.work(program.before, scales)
        start *= machine.stretch(fabric.engaged(np.arange(program.size)))
        self.clocks = ticks(machine.call) + ticks(start)

    def run(self) -> Integers:
        ranks = np.arange(self.program.size)
        beginning = ranks[self.steps < self.program.first[1:]]
        while beginning.size:
            beginning = self._level(beginning)
        if (self.steps < self.program.first[1:]).any():
            raise ScheduleError("the schedules do not end: a rank waits for ever")
        return self.clocks

    def _level(self, beginning: Integers) -> Integers:
        """Begin a step on some ranks, carry what can go, and return the ranks that go on."""
        program = self.program
        steps = self.steps[beginning]
        sends = _ranges(program.send_first[steps], program.send_first[steps + 1])
        recvs = _ranges(program.recv_first[steps], program.recv_first[steps + 1])
        waiting = program.matched[recvs[self.posted_sends[program.matched[recvs]]]]
        self.posted_sends[sends] = True
        self.posted_recvs[recvs] = True
        self.missing[beginning] = (
            program.send_first[steps + 1]
            - program.send_first[steps]
            + program.recv_first[steps + 1]
            - program.recv_first[steps]
        )
        ready = np.concatenate([sends[self.posted_recvs[program.match[sends]]], waiting])
        if ready.size == 0:
            return ready
        source, target = program.source[ready], program.target[ready]
        busy, places = np.unique(np.concatenate([source, target]), return_inverse=True)
        stretch = self.machine.stretch(self.fabric.engaged(busy))
        self._carry(ready, stretch[places[: ready.size]])
        self.missing[busy] -= np.bincount(places, minlength=busy.size)
        done = self.missing[busy] == 0
        self._complete(busy[done], stretch[done])
        busy = busy[done]
        result: Integers = busy[self.steps[busy] < program.first[busy + 1]]
        return result

    def _carry(self, ready: Integers, stretch: Reals) -> None:
        """Set when messages have left and arrived."""
        program, machine = self.program, self.machine
        source, target, units = program.source[ready], program.target[ready], program.units[ready]
        latency, wire = self.fabric.transfer(source, target, units)
        post = self.clocks[:, source] + (self.place[ready] + 1) * ticks(machine.overhead * stretch)
        both = np.maximum(post, self.clocks[:, target])
        start = np.where(np.outer(self.scales, units) > machine.eager, both, post)
        self.sent[:, ready] = start + ticks(np.outer(self.scales, wire))
        self.arrived[:, program.match[ready]] = self.sent[:, ready] + latency

    def _complete(self, ranks: Integers, stretch: Reals) -> None:
        """Set the clocks to the end of the step that ranks are in, and go to the next."""
        program, machine = self.program, self.machine
        steps = self.steps[ranks]
        each = ticks(machine.overhead * stretch)
        sends, send_end = program.send_first[steps], program.send_first[steps + 1]
        recvs, recv_end = program.recv_first[steps], program.recv_first[steps + 1]
        during = machine.work(program.during[steps], self.scales) * stretch
        clocks = self.clocks[:, ranks] + (send_end - sends) * each
        clocks += ticks(machine.step * stretch) + ticks(during)
        for place in range(int((recv_end - recvs).max(initial=0))):
            some = np.flatnonzero(recvs + place < recv_end)
            arrived = self.arrived[:, recvs[some] + place]
            clocks[:, some] = np.maximum(clocks[:, some], arrived) + each[some]
        for place in range(int((send_end - sends).max(initial=0))):
            some = np.flatnonzero(sends + place < send_end)
            clocks[:, some] = np.maximum(clocks[:, some], self.sent[:, sends[some] + place])
        after = machine.work(program.after[steps], self.scales) * stretch
        self.clocks[:, ranks] = clocks + ticks(after)
        self.steps[ranks] += 1
