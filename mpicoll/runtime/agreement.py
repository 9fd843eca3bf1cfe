"""Checked calls: before anything is run, the ranks show each other what they passed.

Two rounds: the arguments as they were given, before any of them may lead to a message;
and the plan that came of them. Where what one rank sends to another is its own affair
(all-to-all, gather and scatter of uneven blocks) two more compare both ends of each pair
and tell all ranks what came of that. A difference raises MismatchError on every rank;
nothing was sent by then, and the communicator can be used on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from mpicoll.algorithms import find
from mpicoll.errors import MismatchError
from mpicoll.runtime.executor import Execution
from mpicoll.runtime.faults import SHOWN, ranks_named, words
from mpicoll.runtime.plan import Plan
from mpicoll.runtime.tags import code_of
from mpicoll.schedule.ir import Call, Schedule

if TYPE_CHECKING:
    from mpicoll.runtime.link import Link
    from mpicoll.runtime.opened import Opened

Claim: TypeAlias = dict[str, str]
Words: TypeAlias = npt.NDArray[np.int64]
Planned: TypeAlias = "Plan | Generator[Execution, None, Plan]"

#: Bytes of a claim on the wire, and characters of one value in it.
CLAIM_BYTES = 2048
VALUE = 80
#: Of what the items of a buffer consist, in a claim; "" goes with all.
DATATYPE = "datatype"
#: What is in a claim and need not be equal: the line that the call comes from, and the number of
#: the persistent plan to be made. After a call that made one on some ranks only, they differ.
SITE, PLAN = "site", "plan"


def checked(
    link: Link, opened: Opened, given: Claim, make: Callable[[], Planned]
) -> Generator[Execution, None, Plan]:
    """Plan a call by ``make``, and return the plan once all ranks are known to agree.

    ``given`` are the arguments that must be equal. An error of ``make`` is raised here on
    this rank, and as MismatchError on the others.
    """
    plan: Plan | None = None
    error: BaseException | None = None
    planning: Generator[Execution, None, Plan] | None = None
    waiting: Execution | None = None
    try:
        planned = make()
        if isinstance(planned, Plan):
            plan = planned
        else:
            planning, waiting = planned, next(planned)
    except StopIteration as stop:
        plan = stop.value
    except BaseException as caught:  # an interrupt, too: the others wait for what comes next
        error = caught
    if opened.plan:
        given = {**given, PLAN: str(opened.plan)}
    claims = yield from _compare(link, opened, 1, given, error)
    if opened.plan:
        opened.take_plan(max(int(claim[PLAN]) for claim in claims))
    while planning is not None and waiting is not None:
        yield waiting
        try:
            waiting = next(planning)
        except StopIteration as stop:
            plan, waiting = stop.value, None
        except BaseException as caught:
            error, waiting = caught, None
    yield from _compare(link, opened, 2, {} if plan is None else _claim(plan), error)
    assert plan is not None
    if plan.pairs is not None:
        yield from _compare_pairs(link, opened, *plan.pairs)
    return plan


def _claim(plan: Plan) -> Claim:
    recipe = plan.recipe
    counts = recipe.counts if plan.pairs is None else ()
    text = str(counts[0]) if len(set(counts)) == 1 else str(list(counts))
    return {
        "algorithm": recipe.algorithm.name,
        "segment": str(recipe.segment_bytes),
        "dtype": plan.dtype,
        "bytes" if plan.dtype == "" else "count": text if counts else "",
    }


def _compare(
    link: Link, opened: Opened, stage: int, claim: Claim, error: BaseException | None
) -> Generator[Execution, None, list[Claim]]:
    """Show a claim to all ranks, return those of all; raise where they differ, or one of them
    has an error."""
    short = {name: _cut(_plain(value)) for name, value in claim.items()}
    if error is not None:
        short = {"error": _plain(words(error))[: 2 * VALUE]}
    short[SITE] = _plain(opened.record.site)[-VALUE:]
    claims = [json.loads(text) for text in (yield from _gather(link, opened, stage, short))]
    if error is not None:
        raise error
    refused = {rank: one["error"] for rank, one in enumerate(claims) if "error" in one}
    if refused:
        told = "; ".join(f"rank {rank}: {text}" for rank, text in list(refused.items())[:SHOWN])
        raise MismatchError(f"call #{opened.sequence} was refused elsewhere: {told}")
    names = dict.fromkeys(name for one in claims for name in one if name not in (SITE, PLAN))
    rows = [row for name in names for row in _rows(name, claims)]
    if rows:
        rows += _rows(SITE, claims)
        raise MismatchError(
            f"the ranks disagree on call #{opened.sequence} of this communicator; nothing was "
            "sent:\n" + "\n".join(rows)
        )
    return claims


def _rows(name: str, claims: list[Claim]) -> list[str]:
    """Return what the ranks claim, where they differ."""
    values: dict[str, list[int]] = {}
    for rank, one in enumerate(claims):
        value = one.get(name, "")
        if value or name != DATATYPE:
            values.setdefault(value, []).append(rank)
    if len(values) < 2:
        return []
    return [
        f"  {name} = {value or 'none'}: {ranks_named(ranks)}" for value, ranks in values.items()
    ]


def _compare_pairs(
    link: Link, opened: Opened, sends: tuple[int, ...], receives: tuple[int, ...]
) -> Generator[Execution, None, None]:
    """Hold what each rank sends to each other one to what that one expects of it."""
    size = link.size
    schedule = find("alltoall", "linear").build(
        Call(link.rank, size, (1,) * size, recv_counts=(1,) * size)
    )
    told = np.empty(size, np.int64)
    yield from _run(link, opened, 3, schedule, np.array(sends, np.int64), told)
    wrong = np.flatnonzero(told != np.array(receives))
    fault: Claim = {}
    if wrong.size:
        peer = int(wrong[0])
        fault = {
            "pair": f"rank {peer} sends {told[peer]} bytes to rank {link.rank}, which expects "
            f"{receives[peer]}"
        }
    claims = [json.loads(text) for text in (yield from _gather(link, opened, 4, fault))]
    faults = [one["pair"] for one in claims if one]
    if faults:
        raise MismatchError(
            f"the ranks disagree on call #{opened.sequence} of this communicator; nothing was "
            "sent:\n  " + "\n  ".join(faults[:SHOWN])
        )


def _gather(
    link: Link, opened: Opened, stage: int, claim: Claim
) -> Generator[Execution, None, list[str]]:
    data = json.dumps(claim).encode()
    assert len(data) <= CLAIM_BYTES
    words = CLAIM_BYTES // 8
    schedule = find("allgather", "bruck").build(Call(link.rank, link.size, (words,) * link.size))
    own = np.frombuffer(data.ljust(CLAIM_BYTES), np.int64)
    every = np.empty((link.size, words), np.int64)
    yield from _run(link, opened, stage, schedule, own, every)
    return [one.tobytes().decode() for one in every]


def _run(
    link: Link, opened: Opened, stage: int, schedule: Schedule, source: Words, target: Words
) -> Generator[Execution, None, None]:
    # The tag must be the same whatever the ranks have called.
    tag = opened.tag(code_of("check", stage))
    memory = (source.reshape(-1).view(np.uint8), target.reshape(-1).view(np.uint8))
    yield from link.exchange(schedule, tag, *memory, opened.record, "check")


def _cut(text: str) -> str:
    """Return text of at most VALUE characters, in which all of it counts."""
    if len(text) <= VALUE:
        return text
    digest = f"... {crc32(text.encode()):08x}"
    return text[: VALUE - len(digest)] + digest


def _plain(text: str) -> str:
    """Return text of which a character is a byte, so that what is cut has a length."""
    return text.encode("ascii", "backslashreplace").decode()
