"""Batch normalisation with the statistics of the batches of all ranks.

Count, mean and sum of squared deviations of each rank are merged by the formula of T. F. Chan,
G. H. Golub and R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances" (1979), which never subtracts large sums of squares. Every rank merges the same
numbers in rank order, one rounded operation at a time: all get the same bits. That is done on
the host; what has the size of a batch stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicoll.comm import Comm
from mpicoll.parallel.agreement import agree, wrapped
from mpicoll.parallel.library import (
    EXPECTED,
    Array,
    as_array,
    beside,
    is_array,
    library,
    on_host,
    place,
    to_host,
)


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """How many values each channel has, their mean, and the sum of squared deviations from it."""

    count: int
    mean: Array
    deviation: Array

    @property
    def variance(self) -> Array:
        """The biased variance, which normalises; zeros without values."""
        return self.deviation / max(1, self.count)

    @property
    def unbiased(self) -> Array:
        """The unbiased variance, which is kept for inference; zeros below two values."""
        return self.deviation / max(1, self.count - 1)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of values together; either may be empty."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        # An exact product of integers, and one division: the shares are rounded once.
        share = self.mean.dtype.type(other.count) / self.mean.dtype.type(count)
        with np.errstate(all="ignore"):
            apart = other.mean - self.mean
            mean = self.mean + apart * share
            deviation = self.deviation + other.deviation + apart * apart * (share * self.count)
        return Moments(count, mean, deviation)


class BatchNormGradients(NamedTuple):
    """Gradients of a loss: of the input, and this rank's part of those of weight and bias.

    The first is where the input is, the others where the weight is, or the input without one.
    """

    x: Array
    weight: Array
    bias: Array


class SyncBatchNorm:
    """Batch normalisation over all ranks: statistics, forward and the sums of backward.

    Inputs have ``channels`` entries along ``axis`` and any other extent, which may differ between
    ranks and be zero on some; of any real floating dtype. Statistics are in ``dtype``,
    float64 or longdouble. Weight and bias are the caller's, one value per channel.

    Inputs are NumPy's, or CuPy's with statistics in float64; a rank may have on its device what
    another has on the host. What has the shape of an input is where that is; statistics are
    always on the host, and weight and bias on either side. So `forward` and `backward`, and what
    they are made of, wait for the device once, for 2 ``channels`` sums; `infer` does not. A
    device adds the values of its rank in an order of its own, the same in every run; what the
    ranks make of the sums has the same bits on all.

    The constructor is collective and raises ValueError on every rank if arguments differ or
    are wrong. The methods are collective where they say so; an input that does not fit raises
    ValueError on its rank before anything is sent, and leaves the other ranks waiting for it.
    """

    def __init__(
        self,
        channels: int,
        comm: MPI.Intracomm | None = None,
        *,
        axis: int = 1,
        eps: float = 1e-5,
        momentum: float = 0.1,
        dtype: npt.DTypeLike = np.float64,
    ) -> None:
        """Agree on the form; the running statistics begin as mean 0 and variance 1."""
        self.comm: Comm = wrapped(comm)
        problem = _problem(channels, axis, eps, momentum, dtype)
        names = ("channels", "axis", "eps", "momentum")
        values = (channels, axis, eps, momentum)
        entries = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        entries.append(f"dtype={dtype if problem else np.dtype(dtype)}")
        agree(self.comm, "SyncBatchNorm", entries, problem=problem)
        self.channels, self.axis = channels, axis
        self.eps, self.momentum = eps, momentum
        self.dtype = np.dtype(dtype)
        self.running_mean: Array = np.zeros(channels, self.dtype)
        self.running_variance: Array = np.ones(channels, self.dtype)

    # -- statistics -------------------------------------------------------------------

    def local(self, x: Array) -> Moments:
        """Return the moments of this rank's values alone, by two passes; not collective."""
        rows = self._rows(x)
        count = rows.shape[1]
        if not count:
            zeros = np.zeros(self.channels, self.dtype)
            return Moments(0, zeros, zeros)
        with np.errstate(all="ignore"):
            mean = rows.mean(axis=1)
            rows -= mean[:, np.newaxis]
            rows *= rows
            own = to_host(library(rows).stack([mean, rows.sum(axis=1)]))
        return Moments(count, *own)

    def statistics(self, x: Array) -> Moments:
        """Return the moments of the values of all ranks, the same bits on every rank.

        Collective: one allgather of 2 ``channels`` + 1 numbers per rank.
        """
        own = self.local(x)
        row = np.concatenate([np.array([own.count], self.dtype), own.mean, own.deviation])
        rows = np.empty((self.comm.size, row.size), self.dtype)
        self.comm.Allgather(row, rows)
        zeros = np.zeros(self.channels, self.dtype)
        merged = Moments(0, zeros, zeros)
        for count, *rest in zip(rows[:, 0], *np.split(rows[:, 1:], 2, axis=1), strict=True):
            merged = merged.merge(Moments(int(count), *rest))
        return merged

    # -- forward ----------------------------------------------------------------------

    def forward(
        self, x: Array, weight: Array | None = None, bias: Array | None = None
    ) -> tuple[Array, Moments]:
        """Return the normalised batch, in the dtype of ``x``, and the moments for `backward`.

        Collective, as `statistics`. The running statistics move by ``momentum`` towards those of
        the batch, the variance unbiased, as in torch; they keep the same bits on all ranks.
        Raises ValueError on every rank if all ranks together have fewer than two values per
        channel, which have no variance.
        """
        self._check_affine(weight, bias)
        moments = self.statistics(x)
        if moments.count < 2:
            raise ValueError(
                self._said(
                    f"{moments.count} value(s) per channel on all ranks together; a variance "
                    "needs two: train on larger batches, or use infer"
                )
            )
        with np.errstate(all="ignore"):
            self.running_mean += self.momentum * (moments.mean - self.running_mean)
            self.running_variance += self.momentum * (moments.unbiased - self.running_variance)
        return self._normalised(x, moments.mean, moments.variance, weight, bias), moments

    def infer(self, x: Array, weight: Array | None = None, bias: Array | None = None) -> Array:
        """Return ``x`` normalised by the running statistics; not collective."""
        self._check_affine(weight, bias)
        self._check(x, "x")
        return self._normalised(x, self.running_mean, self.running_variance, weight, bias)

    # -- backward ---------------------------------------------------------------------

    def backward_sums(self, grad: Array, x: Array, moments: Moments) -> Array:
        """Return, over all ranks and per channel, the sums of grad and of grad times (x - mean).

        Shape ``(2, channels)``; the same bits on every rank. Collective: one allreduce of 2
        ``channels`` numbers, summed in rank order.
        """
        sums = self._sums(grad, x, moments)
        self.comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM, order="rank")
        return sums

    def backward(
        self, grad: Array, x: Array, moments: Moments, weight: Array | None = None
    ) -> BatchNormGradients:
        """Return the gradients of the loss by ``x``, and this rank's part of those of the others.

        ``grad`` is that by the output of `forward`, whose ``x``, ``moments`` and ``weight`` are
        passed again. The gradient of ``x``, in its dtype, takes the sums of all ranks; those of
        weight and bias, in ``dtype``, are this rank's sums, to be reduced as all gradients
        of parameters are. Collective, as `backward_sums`.
        """
        self._check_affine(weight, None)
        own = self._sums(grad, x, moments)
        sums = own.copy()
        self.comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM, order="rank")
        with np.errstate(all="ignore"):
            scale = 1 / np.sqrt(moments.variance + self.eps)
            mean_grad, mean_product = sums / max(1, moments.count)
            slope = mean_product * scale * scale
            by_weight = own[1] * scale
            means, slopes, back = beside(np.stack([moments.mean, slope, scale]), x)
            if weight is not None:
                back = back * self._given(weight, x)
            apart = x.astype(self.dtype)
            apart -= self._wide(means, x.ndim)
            apart *= self._wide(slopes, x.ndim)
            by_x = grad.astype(self.dtype)
            by_x -= self._wide(beside(mean_grad, x), x.ndim)
            by_x -= apart
            by_x *= self._wide(back, x.ndim)
        like = x if weight is None else as_array(weight)
        return BatchNormGradients(
            by_x.astype(x.dtype), beside(by_weight, like), beside(own[0], like)
        )

    # -- inner ------------------------------------------------------------------------

    def _sums(self, grad: Array, x: Array, moments: Moments) -> Array:
        self._check(x, "x")
        self._check(grad, "grad")
        if place(grad) != place(x):
            raise ValueError(self._said(f"grad is on {place(grad)}; expected {place(x)}, as x"))
        if grad.shape != x.shape:
            raise ValueError(
                self._said(f"grad has shape {grad.shape}; expected that of x, {x.shape}")
            )
        grads, apart = self._rows(grad), self._rows(x)
        with np.errstate(all="ignore"):
            apart -= beside(moments.mean, x)[:, np.newaxis]
            apart *= grads
            return to_host(library(x).stack([grads.sum(axis=1), apart.sum(axis=1)]))

    def _normalised(
        self, x: Array, mean: Array, variance: Array, weight: Array | None, bias: Array | None
    ) -> Array:
        with np.errstate(all="ignore"):
            means, scale = beside(np.stack([mean, 1 / np.sqrt(variance + self.eps)]), x)
            if weight is not None:
                scale = scale * self._given(weight, x)
            y = x.astype(self.dtype)
            y -= self._wide(means, x.ndim)
            y *= self._wide(scale, x.ndim)
            if bias is not None:
                y += self._wide(self._given(bias, x), x.ndim)
            result: Array = y.astype(x.dtype)
        return result

    def _given(self, values: Array, x: Array) -> Array:
        """Return weight or bias in ``dtype``, where ``x`` is."""
        array = as_array(values)
        if on_host(array):  # before it goes to a device, which has no longdouble
            array = array.astype(self.dtype, copy=False)
        return beside(array, x).astype(self.dtype, copy=False)

    def _wide(self, channels: Array, ndim: int) -> Array:
        """Return values per channel in a shape that goes with inputs of ``ndim`` axes."""
        shape = [1] * ndim
        shape[self.axis] = self.channels
        return channels.reshape(shape)

    def _rows(self, x: Array) -> Array:
        """Return a copy of ``x``, one row of ``dtype`` per channel."""
        self._check(x, "x")
        rows: Array = library(x).moveaxis(x, self.axis, 0)
        width = x.size // self.channels
        return rows.astype(self.dtype).reshape(self.channels, width)

    def _check(self, x: object, what: str) -> None:
        if not is_array(x) or not _is_real(x.dtype):
            kind = x.dtype if is_array(x) else type(x).__name__
            raise ValueError(
                self._said(f"{what} is of {kind}; expected {EXPECTED} of real floats")
            )
        if not on_host(x) and self.dtype != np.float64:
            raise ValueError(
                self._said(
                    f"{what} is on {place(x)}, where statistics in {self.dtype} are not to be "
                    "had; pass dtype=float64 to the constructor, or NumPy arrays"
                )
            )
        extent = x.shape[self.axis] if -x.ndim <= self.axis < x.ndim else None
        if extent != self.channels:
            raise ValueError(
                self._said(
                    f"{what} has shape {x.shape}; expected {self.channels} channels along axis "
                    f"{self.axis}"
                )
            )

    def _check_affine(self, weight: Array | None, bias: Array | None) -> None:
        for name, values in (("weight", weight), ("bias", bias)):
            shape = (self.channels,)
            found = values.shape if is_array(values) else np.shape(cast(Any, values))
            if values is not None and found != shape:
                raise ValueError(self._said(f"{name} has shape {found}; expected {shape}"))

    def _said(self, what: str) -> str:
        return f"SyncBatchNorm on rank {self.comm.rank}: {what}"


def _is_real(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def _problem(
    channels: object, axis: object, eps: object, momentum: object, dtype: object
) -> str | None:
    """Say what is wrong with arguments, of whatever type: the other ranks have to hear of it."""
    if not isinstance(channels, int) or channels < 1:
        return f"channels={channels!r}; expected a number, 1 or more"
    if not isinstance(axis, int):
        return f"axis={axis!r}; expected a number"
    if not isinstance(eps, float | int) or not eps >= 0:
        return f"eps={eps!r}; expected a number, 0 or more"
    if not isinstance(momentum, float | int) or not 0 <= momentum <= 1:
        return f"momentum={momentum!r}; expected a number from 0 to 1"
    try:
        known = (np.float64, np.longdouble)
        wide = dtype is not None and np.dtype(cast(Any, dtype)).type in known
    except TypeError:
        wide = False
    if not wide:
        return f"dtype={dtype!r}; expected float64 or longdouble"
    return None
