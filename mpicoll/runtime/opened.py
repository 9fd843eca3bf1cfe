"""A call that has its sequence number, and what it holds until it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi4py import MPI

from mpicoll.runtime import staging
from mpicoll.runtime.buffers import Buffer
from mpicoll.runtime.device_run import DeviceReduction
from mpicoll.runtime.operators import Reducer
from mpicoll.runtime.record import Record

if TYPE_CHECKING:
    from mpicoll.runtime.link import Link


class Opened:
    """A call that has its sequence number.

    ``keeps`` is set when the call goes on after it has returned: it then has copies of
    derived datatypes, in ``held``, since the caller may free them. ``lane`` is there when
    one of its buffers is on a device. ``plan`` is the number of the persistent plan that it
    makes, 0 if it makes none, and ``plan_tag`` its tag, once it has one.
    """

    __slots__ = ("held", "keeps", "lane", "link", "plan", "plan_tag", "record", "sequence")

    def __init__(self, link: Link, sequence: int, record: Record, keeps: bool) -> None:
        """Begin with nothing held."""
        self.link = link
        self.sequence = sequence
        self.record = record
        self.keeps = keeps
        self.held: list[MPI.Datatype] | None = None
        self.lane: staging.Lane | None = None
        self.plan = 0
        self.plan_tag: int | None = None

    def tag(self, code: int) -> int:
        """Return the tag for messages of this call of one kind; see `code_of`."""
        return self.link.tags.tag(self.sequence, code)

    def hold(self, *buffers: Buffer | None) -> None:
        """Keep what the datatypes of the buffers need until the call is over."""
        if self.keeps:
            self.held = self.held or []
            for buffer in buffers:
                if buffer is not None:
                    self.held += buffer.own_datatypes()
        if staging.MET:
            if self.lane is not None:
                self.lane.close()  # of a planner that is asked again
            self.lane = staging.lane_of(buffers, self.link.settings, self.link.size)

    def folds(self, reduction: Reducer, compress: object) -> Reducer:
        """Return the reduction that works where the data is; call it after `hold`.

        What the device has no kernel for goes through the host, the whole call.
        """
        lane = self.lane
        if lane is None or lane.hosted:
            return reduction
        kernel = None
        if compress is None and self.link.size <= staging.MOST_OPERANDS:
            kernel = lane.backend.kernel(reduction)
        if kernel is None:
            lane.hosted = True
            return reduction
        return DeviceReduction(lane, kernel)

    def take_plan(self, number: int) -> None:
        """Take the tag of the persistent plan with that number; collective."""
        self.plan_tag = self.link.tags.take_plan(number)

    def release(self) -> None:
        """Give up what was held."""
        if self.plan_tag is not None:
            self.link.tags.give_plan(self.plan_tag)
            self.plan_tag = None
        while self.held:
            self.held.pop().Free()
        if self.lane is not None:
            self.lane.close()
