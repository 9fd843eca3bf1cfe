"""What is learnt: a step over this rank's share of a batch, and the accuracy of the result."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
from mpi4py import MPI

import mpicoll
from training.data import Data, share
from training.network import Perceptron, classify, log_loss
from training.stores import TrainedStore

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Task(Protocol):
    """A network, its store and its loss; the methods are collective."""

    @property
    def store(self) -> TrainedStore:
        """Where the parameters are."""

    def learn(self, rows: Array, batch: int, epoch: int) -> float:
        """Take a step with this rank's rows of a batch; return the summed loss of the rows."""

    def accuracy(self) -> float:
        """Return the share of held-out samples that are classified right."""


class Classify:
    """Labels by a perceptron, by the cross-entropy: ddp and zero."""

    def __init__(
        self, net: Perceptron, store: TrainedStore, data: Data, comm: mpicoll.Comm
    ) -> None:
        self.net, self.store, self._data, self._comm = net, store, data, comm

    def learn(self, rows: Array, batch: int, epoch: int) -> float:
        x, y = self._data.x[rows], self._data.y[rows]
        chances = classify(self.net, self.store, x, y, self.store.scale / batch)
        self.store.step()
        return log_loss(chances, y)

    def accuracy(self) -> float:
        rows = share(self._comm, np.arange(len(self._data.y_test)))
        output = self.net.forward(self.store, self._data.x_test[rows])[-1]
        right = int((output.argmax(axis=1) == self._data.y_test[rows]).sum())
        return summed(self._comm, right) / len(self._data.y_test)


def summed(comm: mpicoll.Comm, number: int) -> int:
    """Return the sum over all ranks."""
    total = np.array([number], np.int64)
    comm.Allreduce(MPI.IN_PLACE, total)
    return int(total[0])
