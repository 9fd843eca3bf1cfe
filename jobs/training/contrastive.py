"""A contrastive embedding: two views of each sample, told apart from those of all ranks.

A view is the sample with noise added. InfoNCE (A. van den Oord, Y. Li,
O. Vinyals, arXiv:1807.03748), both ways: each view has to find the other view of its sample
among those of the whole batch, by the softmax of cosines over the temperature. No label is used
in training. The accuracy is that of a linear probe: ridge regression from the embeddings of the
training samples to their labels, whose sums are taken over all ranks.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.parallel import gather_features
from training.clock import Clock
from training.data import Data, share
from training.network import Perceptron, one_hot, softmax
from training.stores import TrainedStore
from training.tasks import summed

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

TEMPERATURE = 0.2
NOISE = 0.4
RIDGE = 1e-3


def views(x: Array, rows: Array, seed: int, epoch: int) -> tuple[Array, Array]:
    """Return two views of each sample; they follow from seed, epoch and sample alone."""
    noise = np.empty((2, *x.shape), x.dtype)
    for at, row in enumerate(rows.tolist()):
        rng = np.random.default_rng([seed, epoch, row])
        noise[:, at] = rng.normal(0, NOISE, (2, x.shape[1]))
    return x + noise[0], x + noise[1]


def normalised(z: Array) -> tuple[Array, Array]:
    """Return rows of length one, and the lengths there were."""
    length = np.sqrt((z * z).sum(axis=1, keepdims=True)) + 1e-6
    return z / length, length


def info_nce(own: Array, others: Array, places: Array) -> tuple[float, Array]:
    """Return the summed loss of rows that have to find ``others[places]``, and its gradient.

    The gradient is by the scores, ``own @ others.T / TEMPERATURE``.
    """
    chances = softmax(own @ others.T / TEMPERATURE)
    loss = -np.log(chances[np.arange(len(own)), places] + 1e-12).sum()
    return float(loss), chances - one_hot(places, len(others), own.dtype)


class Contrast:
    """An embedding by InfoNCE over the views of all ranks: contrastive."""

    def __init__(
        self,
        net: Perceptron,
        store: TrainedStore,
        data: Data,
        comm: mpicoll.Comm,
        clock: Clock,
        seed: int,
    ) -> None:
        self.net, self.store = net, store
        self._data, self._comm, self._clock, self._seed = data, comm, clock, seed

    def learn(self, rows: Array, batch: int, epoch: int) -> float:
        loss = self.backward(*views(self._data.x[rows], rows, self._seed, epoch), batch)
        self.store.step()
        return loss

    def backward(self, first: Array, second: Array, batch: int) -> float:
        """Hand over the gradients of the mean loss of the batch; return that of these rows."""
        count, width = len(first), self.net.widths[-1]
        values = self.net.forward(self.store, np.concatenate([first, second]))
        z, length = normalised(values[-1])
        with self._clock.communication(under_way=False):
            pairs = np.ascontiguousarray(z.reshape(2, count, width).swapaxes(0, 1))
            gathered = gather_features(pairs, self._comm)
        everyone = gathered.features
        places = np.arange(gathered.own.start, gathered.own.stop)
        by_all = np.zeros_like(everyone)
        by_own = np.empty_like(pairs)
        loss = 0.0
        for side in (0, 1):
            others = np.ascontiguousarray(everyone[:, 1 - side])
            part, by_score = info_nce(pairs[:, side], others, places)
            by_score = by_score / (2 * batch * TEMPERATURE)
            by_own[:, side] = by_score @ others
            by_all[:, 1 - side] += by_score.T @ pairs[:, side]
            loss += part / 2
        with self._clock.communication(under_way=False):
            by_own += gathered.backward(by_all)
        by_z = by_own.swapaxes(0, 1).reshape(2 * count, width)
        # The derivative of z / |z|: what is along z changes nothing.
        by_output = (by_z - z * (by_z * z).sum(axis=1, keepdims=True)) / length
        self.net.backward(self.store, values, by_output)
        return loss

    def accuracy(self) -> float:
        """Return the accuracy of a linear probe; every rank embeds its share of the samples."""
        data = self._data
        train = share(self._comm, np.arange(len(data.y)))
        z = self._embed(data.x[train])
        sums = np.concatenate([z.T @ z, z.T @ one_hot(data.y[train], data.classes, z.dtype)], 1)
        self._comm.Allreduce(MPI.IN_PLACE, sums)
        width = len(sums)
        probe = np.linalg.solve(sums[:, :width] + RIDGE * np.eye(width), sums[:, width:])
        test = share(self._comm, np.arange(len(data.y_test)))
        found = (self._embed(data.x_test[test]) @ probe).argmax(axis=1)
        return summed(self._comm, int((found == data.y_test[test]).sum())) / len(data.y_test)

    def _embed(self, x: Array) -> Array:
        z, _ = normalised(self.net.forward(self.store, x)[-1].astype(np.float64))
        return np.concatenate([z, np.ones((len(z), 1))], axis=1)
