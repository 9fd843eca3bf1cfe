"""How a rank asks other processes of its host for their dumps, though they are in their own code.

By a datagram to an abstract Unix socket, which Linux alone has, and not by a signal, for which
users have handlers of their own. The name of the socket is made of user and process. All of it
is best effort: nothing waits, and what fails is passed over.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Iterable
from typing import NamedTuple

BYTES = 1024  #: of a question on the wire, at most
MOST = 1024  #: questions that are taken at a time
CREDENTIALS = struct.Struct("iII")  #: process, user and group of a sender


class Question(NamedTuple):
    """Rank ``by`` of a communicator asks ``rank``; ``job`` is that of the dumps.

    The process may be another one than is meant: process ids are those of a host or a container.
    """

    job: str
    communicator: str
    rank: int
    by: int


def _name(pid: int) -> str:
    return f"\0mpicoll-flight-{os.getuid()}-{pid}"


def ask(questions: Iterable[tuple[int, Question]]) -> None:
    """Send each question to the process of its id, if there is one on this host that listens."""
    if sys.platform != "linux":
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
            mouth.setblocking(False)
            for pid, question in questions:
                _send(mouth, pid, question)
    except OSError:
        return  # no more files may be opened


def _send(mouth: socket.socket, pid: int, question: Question) -> None:
    try:
        mouth.sendto(json.dumps(question).encode(), _name(pid))
    except OSError:
        return  # on another host, ended, or asked by many already


def listening() -> socket.socket | None:
    """Return a socket on which questions to this process come; None where there can be none."""
    if sys.platform != "linux":
        return None
    ear = None
    try:
        ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        ear.setblocking(False)
        ear.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ear.bind(_name(os.getpid()))
    except OSError:  # another one has the name: a process of another container, perhaps
        if ear is not None:
            ear.close()
        return None
    return ear


def heard(ear: socket.socket) -> list[Question]:
    """Return the questions that have come from processes of this user.

    Raises OSError where the socket has been closed, as programs do that close all they know not.
    """
    found: list[Question] = []
    for _ in range(MOST):
        try:
            data, about, _, _ = ear.recvmsg(BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
        except BlockingIOError:
            break
        if os.getuid() in map(_user, about) and (question := _parsed(data)):
            found.append(question)
    return found


def _user(about: tuple[int, int, bytes]) -> int | None:
    """Return the user who sent a datagram, as the kernel says; anybody can send one."""
    level, kind, data = about
    if sys.platform != "linux" or (level, kind) != (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
        return None
    user: int = CREDENTIALS.unpack(data)[1]
    return user


def _parsed(data: bytes) -> Question | None:
    try:
        job, communicator, rank, by = json.loads(data)
    except (RecursionError, TypeError, ValueError):  # of another program
        return None
    return Question(str(job), str(communicator), rank, by)
