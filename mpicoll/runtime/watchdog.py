"""Time limits: who ran into one, what the others were doing, and an end that is bounded.

When a rank's limit is over it sends its state to all others and collects theirs for a
short while. Whoever waits in a collective answers at once, and gives up soon after unless
its own call completes; whoever is in its own code learns of it at its next call. After
that the communicator is poisoned: messages to a rank that is gone can not be taken back,
so what they need is parked, nothing is freed, and the process ends by Abort.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout, PoisonedError
from mpicoll.runtime.flight import RECORDER
from mpicoll.runtime.record import Record

if TYPE_CHECKING:
    from mpicoll.runtime.link import Link
    from mpicoll.runtime.progress import Operation

#: Seconds for which a rank whose limit is over collects the states of the others, and for
#: which one that hears of it goes on trying: the second is well within the first.
ASK_SECONDS = 2.0
GIVE_UP_SECONDS = 0.5
#: Seconds between two looks at the control messages while a rank waits.
LOOK_SECONDS = 0.01
#: Seconds that a rank which ends waits for the others to end as well.
LEAVE_SECONDS = 10.0
#: Seconds that Abort may take before the process ends itself.
ABORT_SECONDS = 5.0
#: Bytes of a state on the wire, so that it is sent without waiting for its receiver.
STATE_BYTES = 1024

State = dict[str, Any]

#: Communicators on which a time limit was in force.
WATCHED: list[Link] = []

#: What messages that may never be received need until the process ends.
_PARKED: list[Any] = []


def watch(operation: Operation) -> None:
    """Look at the clock and at what others say; raise CollectiveTimeout when time is over."""
    now = time.perf_counter()
    link = operation.link
    if now >= link.next_look:
        link.next_look = now + LOOK_SECONDS
        for other in WATCHED:
            if other is not link:
                _listen(other, operation)
        if _listen(link, operation) or link.poison:
            soon = now + GIVE_UP_SECONDS
            operation.deadline = min(operation.deadline or soon, soon)
    if operation.deadline is not None and now >= operation.deadline:
        _expire(operation)


def learn(link: Link) -> None:
    """Poison ``link`` if another rank has run into a limit on it."""
    # The first look may only let the MPI take in what has come.
    if _listen(link, None) or _listen(link, None):
        told = link.states[link.expired[0]]
        link.poison = (
            f"this communicator can not be used any more: {_call(told)} timed out on rank "
            f"{link.expired[0]}"
        )


def _listen(link: Link, operation: Operation | None) -> bool:
    """Take the states that have come, answer them; return whether somebody's limit is over.

    A state has "kind": "expired", "answer", or "leaving" when the process ends.
    """
    status = MPI.Status()
    while message := link.hidden.Improbe(MPI.ANY_SOURCE, link.tags.control, status):
        data = bytearray(status.count)
        message.Recv([data, MPI.BYTE])
        state = json.loads(data)
        if state["kind"] == "leaving":
            link.leaving.add(status.source)
            link.states.setdefault(status.source, state)
            continue
        link.states[status.source] = state
        if state["kind"] == "expired":
            link.expired.append(status.source)
            _tell(link, "answer", operation, [status.source])
    return bool(link.expired)


def _tell(link: Link, kind: str, operation: Operation | None, to: list[int]) -> None:
    """Send what this rank is doing; nobody waits for that to arrive."""
    state: State = {"kind": kind, "sequence": link.tags.sequence}
    if operation is not None:
        record = operation.record
        state["elsewhere"] = operation.link is not link
        state |= {
            "sequence": record.sequence if operation.link is link else link.tags.sequence,
            "collective": record.collective,
            "algorithm": record.algorithm,
            "step": record.step,
            "steps": record.steps,
            "waits": operation.pending()[:32],
        }
    data = json.dumps(state).encode()
    assert len(data) <= STATE_BYTES
    for rank in to:
        _PARKED.append((data, link.hidden.Isend([data, MPI.BYTE], rank, link.tags.control)))


def _expire(operation: Operation) -> NoReturn:
    """Ask the others, poison the communicator, and raise CollectiveTimeout."""
    link, record = operation.link, operation.record
    _PARKED.append(operation)
    if link.asked:  # for another call of this rank, which raised what they said
        raise PoisonedError(link.poison)
    link.asked = True
    # Known before others are asked: an interrupt of that changes nothing.
    link.poison = (
        f"this communicator can not be used any more: {record.collective} #{record.sequence} "
        f"timed out on rank {link.rank}, this one"
    )
    waits = operation.pending()
    record.waits = waits
    others = [rank for rank in range(link.size) if rank != link.rank]
    waited = time.perf_counter() - record.start
    _tell(link, "expired", operation, others)
    until = time.perf_counter() + ASK_SECONDS
    while len(link.states) < len(others) and time.perf_counter() < until:
        for one in WATCHED:  # on another one, others may ask this rank
            _listen(one, operation)
        time.sleep(0.001)
    silent = tuple(rank for rank in others if rank not in link.states)
    error = CollectiveTimeout(_message(link, record, waits, waited, silent))
    error.collective, error.sequence = record.collective, record.sequence
    error.algorithm, error.step, error.steps = record.algorithm, record.step, record.steps
    error.waits, error.silent = waits, silent
    record.error = f"CollectiveTimeout: {error}"
    RECORDER.dump(link.settings.flight, record.error)
    raise error


def _message(
    link: Link, record: Record, waits: tuple[int, ...], waited: float, silent: tuple[int, ...]
) -> str:
    by = f" by {record.algorithm}" if record.algorithm else ""
    text = [
        f"{record.collective} #{record.sequence}{by} on rank {link.rank} of {link.size} is not "
        f"complete after {waited:.3g} s: step {record.step} of {record.steps}"
    ]
    if waits:
        text.append(f"it waits for {_ranks(waits)}")
    text.append(f"not heard from: {_ranks(silent)}" if silent else "all ranks answered")
    for rank, state in sorted(link.states.items())[:16]:
        text.append(f"rank {rank}: {_doing(state, record)}")
    text.append(
        f"the flight recorders are in {link.settings.flight}: python -m mpicoll doctor --flight "
        f"{link.settings.flight}"
    )
    return "; ".join(text)


def _doing(state: State, record: Record) -> str:
    """Say what another rank was doing."""
    if "collective" not in state:
        return f"in its own code after call #{state['sequence']}"
    where = f"step {state['step']} of {state['steps']}"
    if state["waits"]:
        where += f", waits for {_ranks(state['waits'])}"
    if state["elsewhere"]:
        after = f"after call #{state['sequence']} here"
        return f"in {state['collective']} on another communicator, {where}, {after}"
    other = (state["sequence"], state["collective"]) != (record.sequence, record.collective)
    return f"in {_call(state)} instead, {where}" if other else f"in it too, {where}"


def _call(state: State) -> str:
    return f"{state.get('collective', 'a call')} #{state['sequence']}"


def _ranks(ranks: tuple[int, ...] | list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:16])
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' * (len(ranks) != 1)} {shown}{more}"


def leave(links: list[Link]) -> NoReturn:
    """End the job, in bounded time: a rank is gone and Finalize would wait for it.

    Abort ends the other ranks too, so those that are alive and know of the time-out are
    given time to clean up as this one did.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    until = time.perf_counter() + LEAVE_SECONDS
    for link in links:
        others = [rank for rank in range(link.size) if rank != link.rank]
        _tell(link, "leaving", None, others)
        while not set(link.states) <= link.leaving and time.perf_counter() < until:
            _listen(link, None)
            time.sleep(LOOK_SECONDS)

    def end() -> None:
        time.sleep(ABORT_SECONDS)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()
    MPI.COMM_WORLD.Abort(1)
    os._exit(1)
