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
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout, PoisonedError
from mpicoll.runtime.abort import end_in, flush
from mpicoll.runtime.faults import SHOWN, ranks_named
from mpicoll.runtime.flight import FINALIZE, RECORDER, absolute
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

#: Ranks of the world that have ended by an exception.
FAILED: set[int] = set()

#: What messages that may never be received need until the process ends.
PARKED: list[Any] = []


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


def hear(links: list[Link]) -> None:
    """Take what has come on communicators on which no time limit was in force."""
    for link in links:
        if not link.watched:
            _listen(link, None)


def _listen(link: Link, operation: Operation | None) -> bool:
    """Take the states that have come, answer them; return whether somebody's limit is over.

    A state has "kind": "expired", "answer", "leaving" when the process ends after a time-out,
    or "failed" when it ends by an exception.
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
        if state["kind"] == "failed":
            FAILED.add(link.ranks[status.source])
            continue
        link.states[status.source] = state
        if state["kind"] == "expired":
            link.expired.append(status.source)
            _tell(link, "answer", operation, [status.source])
    return bool(link.expired)


def _tell(link: Link, kind: str, operation: Operation | None, to: list[int]) -> list[MPI.Request]:
    """Send what this rank is doing; what is under way has all that it needs."""
    if kind == "answer" and link.asked:
        return []  # all have been told in which call its limit ran out, and that says more
    state: State = {"kind": kind, "sequence": link.tags.sequence}
    if operation is not None and operation.record.collective == FINALIZE:
        last = RECORDER.last(link.identity)
        state |= {"ended": True, "at": os.path.basename(last.site)[-60:] if last else ""}
    elif operation is not None:
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
    sent = [link.hidden.Isend([data, MPI.BYTE], rank, link.tags.control) for rank in to]
    PARKED.append((data, sent))
    return sent


def _expire(operation: Operation) -> NoReturn:
    """Ask the others, poison the communicator, and raise CollectiveTimeout."""
    link, record = operation.link, operation.record
    PARKED.append(operation)
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
    _collect(operation, len(others))
    # Whoever waits in a call has answered by now. The rest of the time is for dumps.
    RECORDER.ask(
        link.identity, {rank: link.pids[rank] for rank in others if rank not in link.states}
    )
    _collect(operation, len(others))
    silent = tuple(rank for rank in others if rank not in link.states)
    error = CollectiveTimeout(_message(link, record, waits, waited, silent))
    error.collective, error.sequence = record.collective, record.sequence
    error.algorithm, error.step, error.steps = record.algorithm, record.step, record.steps
    error.waits, error.silent = waits, silent
    record.error = f"CollectiveTimeout: {error}"
    RECORDER.dump(link.settings.flight, record.error)
    raise error


def _collect(operation: Operation, others: int) -> None:
    """Take the states of the others as they come, for half of the time that there is."""
    until = time.perf_counter() + ASK_SECONDS / 2
    link = operation.link
    while True:
        for one in WATCHED:  # on another one, others may ask this rank
            _listen(one, operation)
        for rank in link.failed:  # told on another one, perhaps
            link.states.setdefault(rank, {"kind": "failed"})
        if len(link.states) >= others or time.perf_counter() > until:
            return
        time.sleep(0.001)


def _message(
    link: Link, record: Record, waits: tuple[int, ...], waited: float, silent: tuple[int, ...]
) -> str:
    text = [
        f"{_head(record)} on rank {link.rank} of {link.size} (communicator "
        f"{RECORDER.name(link.identity)}) is not complete after {waited:.3g} s"
        f"{_stage(link, record)}"
    ]
    if waits:
        text.append(f"it waits for {ranks_named(waits)}")
    if silent:
        text.append(f"not heard from: {ranks_named(silent)}")
    elif not link.failed:
        text.append("all ranks answered")
    for rank, state in sorted(link.states.items())[:SHOWN]:
        text.append(f"rank {rank}: {_doing(state, record)}")
    folder = shlex.quote(str(absolute(link.settings.flight)))
    text.append(f"the flight recorders: python -m mpicoll doctor --flight {folder}")
    return "\n  ".join(text)


def _head(record: Record) -> str:
    if record.collective == FINALIZE:
        return "the end of the program"
    by = f" by {record.algorithm}" if record.algorithm else ""
    return f"{record.collective} #{record.sequence}{by}"


def _stage(link: Link, record: Record) -> str:
    """Say how far a call is."""
    if not record.steps:
        return ""
    if record.algorithm:
        return f": step {record.step} of {record.steps}"
    checks = link.settings.check
    return f", while the ranks {'compare their calls' if checks else 'agree on their counts'}"


def _doing(state: State, record: Record) -> str:
    """Say what another rank was doing."""
    if state["kind"] == "failed":
        return "has ended by an exception"
    after = f"after call #{state['sequence']}" if state["sequence"] else "before its first call"
    if "ended" in state:
        at = f" ({state['at']})" if state["at"] else ""
        return f"has ended its program {after}{at}"
    if "collective" not in state:
        return f"in its own code {after}"
    where = f", step {state['step']} of {state['steps']}" if state["steps"] else ""
    if state["waits"]:
        where += f", waits for {ranks_named(state['waits'])}"
    if state["elsewhere"]:
        return f"in {state['collective']} on another communicator{where}, {after} here"
    if (state["sequence"], state["collective"]) == (record.sequence, record.collective):
        return f"in it too{where}"
    instead = "" if record.collective == FINALIZE else " instead"
    return f"in {_call(state)}{instead}{where}"


def _call(state: State) -> str:
    if "ended" in state:
        return "the end of the program"
    return f"{state.get('collective', 'a call')} #{state['sequence']}"


def fail(links: list[Link]) -> list[MPI.Request]:
    """Tell each process that this one ends by an exception and waits for nobody.

    Returns what is under way: some MPIs send nothing on in Finalize.
    """
    told = {MPI.COMM_WORLD.Get_rank()}
    sent: list[MPI.Request] = []
    for link in sorted(links, key=lambda link: not link.watched):  # where somebody listens
        new = [rank for rank, world in enumerate(link.ranks) if world not in told]
        sent += _tell(link, "failed", None, new)
        told.update(link.ranks)
    return sent


def leave(links: list[Link]) -> NoReturn:
    """End the job, in bounded time: a rank is gone and Finalize would wait for it.

    Abort ends the other ranks too, so those that are alive and know of the time-out are
    given time to clean up as this one did.
    """
    flush(sys.stdout)
    flush(sys.stderr)
    try:
        until = time.perf_counter() + LEAVE_SECONDS
        for link in links:
            others = [rank for rank in range(link.size) if rank != link.rank]
            _tell(link, "leaving", None, others)
            here = set(link.states) - link.failed
            while not here <= link.leaving and time.perf_counter() < until:
                _listen(link, None)
                time.sleep(LOOK_SECONDS)
        end_in(ABORT_SECONDS)
        MPI.COMM_WORLD.Abort(1)
    finally:
        os._exit(1)
