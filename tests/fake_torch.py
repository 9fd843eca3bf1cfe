"""As much of torch as array functions ask for: torch itself is too large for these tests.

A tensor lends its memory by DLPack alone, and refuses where torch does: when it requires
gradients, or when it is conjugated lazily. What torch lends wrongly, a lazy change of sign,
comes out wrong here, too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from lender import Array, Lender

contiguous_format = "contiguous"


class Tensor(Lender):
    """An array as torch has it; ``requires_grad``, ``conj`` and ``neg`` are its lazy states."""

    def __init__(
        self, array: Array, requires_grad: bool = False, conj: bool = False, neg: bool = False
    ) -> None:
        super().__init__(array)
        self.requires_grad, self.conj, self.neg = requires_grad, conj, neg
        self.dtype, self.device = f"torch.{array.dtype.name}", "cpu"
        self.shape, self.ndim = array.shape, array.ndim

    def __dlpack__(self, **keywords: Any) -> Any:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        if self.conj:
            raise BufferError("Can't export tensors with the conjugate bit set")
        return super().__dlpack__(**keywords)

    def is_neg(self) -> bool:
        return self.neg

    def detach(self) -> Tensor:
        return type(self)(self.array, False, self.conj, self.neg)

    def resolve_conj(self) -> Tensor:
        if not self.conj:
            return self
        return type(self)(conjugate(self.array), self.requires_grad, False, self.neg)

    def resolve_neg(self) -> Tensor:
        if not self.neg:
            return self
        return type(self)(negative(self.array), self.requires_grad, self.conj, False)

    def contiguous(self) -> Tensor:
        array = self.array.copy(order="C") if not self.array.flags.c_contiguous else self.array
        return type(self)(array, self.requires_grad, self.conj, self.neg)

    def clone(self, memory_format: str) -> Tensor:
        assert memory_format == contiguous_format
        array = self.array.copy(order="C")
        return type(self)(array, self.requires_grad, self.conj, self.neg)


# NumPy makes scalars of 0-d results, and ml_dtypes has no conjugates.
def conjugate(x: Array) -> Array:
    return np.asarray(x.conj() if np.iscomplexobj(x) else x, x.dtype)


def negative(x: Array) -> Array:
    return np.asarray(-x, x.dtype)


Tensor.__module__ = "torch"


class Subclass(Tensor):
    """A class of tensors that somebody else wrote."""


def empty(shape: tuple[int, ...], dtype: str, device: str) -> Tensor:
    """Return a tensor of ones: what a call leaves as it was, shows."""
    assert device == "cpu"
    return Tensor(np.ones(shape, np.dtype(dtype.removeprefix("torch."))))


MODULE = SimpleNamespace(Tensor=Tensor, empty=empty, contiguous_format=contiguous_format)
