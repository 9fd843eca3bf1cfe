"""Numbers with a bound on their rounding errors, for the arithmetic of the networks.

A `Bounded` array stands for every evaluation of an expression in one floating type, whatever
the order of its sums: each lies within ``error`` of the exact value, elementwise. So two of them,
such as a gradient from one process and from eight, differ by twice that at most. The error
follows each operation by the standard model, fl(a op b) = (a op b)(1 + d), |d| <= u, and a sum
or product of n terms in any order has the factor gamma(n) = n u / (1 - n u)
(N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 2002, chapters 3 and 4).
Adding the zeros of a rank without samples rounds nothing.

``value`` is computed in float64, so it may itself be as far from the exact value; where the exact
magnitude is needed, ``|value| + error`` stands for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

#: NumPy's exp has less than 4 ulps of error in float32 and less in float64: 8 u.
EXP_ROUNDINGS = 8


@dataclass(frozen=True, slots=True)
class Format:
    """A floating type: its unit roundoff, and what an underflow may cost."""

    unit: float
    tiny: float

    @classmethod
    def of(cls, dtype: Any) -> Format:
        """Return that of float32 or float64."""
        about = np.finfo(dtype)
        return cls(float(about.eps) / 2, float(about.tiny))

    def gamma(self, n: int) -> float:
        """Return Higham's gamma(n)."""
        return n * self.unit / (1 - n * self.unit)


class Bounded(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of which every evaluation in a format lies within ``error`` of the exact one."""

    def __init__(self, value: Array, error: Array | float, form: Format) -> None:
        self.value: Array = np.asarray(value, np.float64)
        self.error: Array = np.broadcast_to(np.asarray(error, np.float64), self.value.shape)
        self.form = form

    @classmethod
    def exact(cls, array: Array) -> Bounded:
        """Return numbers that are the same in every evaluation."""
        return cls(array, 0.0, Format.of(array.dtype))

    @property
    def size(self) -> Array:
        """A bound on the exact magnitude, and on that of every evaluation's."""
        return np.abs(self.value) + self.error

    def rounded(self, times: int = 1) -> Bounded:
        """Return it after so many roundings more."""
        more = self.form.gamma(times) * self.size + times * self.form.tiny
        return Bounded(self.value, self.error + more, self.form)

    # -- what the networks use of NumPy -------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **more: Any) -> Any:
        """Apply the rule of a ufunc; Python's numbers are rounded, arrays are exact."""
        rule = _RULES.get(ufunc)
        if rule is None or method != "__call__" or more:
            return NotImplemented
        return rule(*(self._lifted(one) for one in inputs))

    def _lifted(self, other: Any) -> Bounded:
        if isinstance(other, Bounded):
            return other
        if isinstance(other, np.ndarray):
            return Bounded(other, 0.0, self.form)
        return Bounded(np.float64(other), self.form.unit * abs(other), self.form)

    def __getitem__(self, at: Any) -> Bounded:
        return Bounded(self.value[at], self.error[at], self.form)

    def __len__(self) -> int:
        return len(self.value)

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of ``value``."""
        return self.value.dtype

    @property
    def T(self) -> Bounded:
        """Transposed."""
        return Bounded(self.value.T, self.error.T, self.form)

    def sum(self, axis: int, keepdims: bool = False) -> Bounded:
        """Sum in any order."""
        error = self.error.sum(axis, keepdims=keepdims)
        size = self.size.sum(axis, keepdims=keepdims)
        factor = self.form.gamma(max(0, self.value.shape[axis] - 1))
        return Bounded(self.value.sum(axis, keepdims=keepdims), error + factor * size, self.form)

    def max(self, axis: int, keepdims: bool = False) -> Bounded:
        """Return the largest; maxima differ by no more than what they are of."""
        error = self.error.max(axis, keepdims=keepdims)
        return Bounded(self.value.max(axis, keepdims=keepdims), error, self.form)


def _add(a: Bounded, b: Bounded) -> Bounded:
    return Bounded(a.value + b.value, a.error + b.error, a.form).rounded()


def _subtract(a: Bounded, b: Bounded) -> Bounded:
    return Bounded(a.value - b.value, a.error + b.error, a.form).rounded()


def _multiply(a: Bounded, b: Bounded) -> Bounded:
    error = a.size * b.error + a.error * b.size
    return Bounded(a.value * b.value, error, a.form).rounded()


def _divide(a: Bounded, b: Bounded) -> Bounded:
    value = a.value / b.value
    least = np.abs(b.value) - 2 * b.error  # of every evaluation's magnitude
    slope = (a.error + (np.abs(value) + a.error / np.abs(b.value)) * b.error) / least
    return Bounded(value, np.where(least > 0, slope, np.inf), a.form).rounded()


def _matmul(a: Bounded, b: Bounded) -> Bounded:
    inner = a.value.shape[-1]
    error = a.size @ b.error + a.error @ b.size + inner * a.form.tiny
    return Bounded(a.value @ b.value, error + a.form.gamma(inner) * (a.size @ b.size), a.form)


def _exp(a: Bounded) -> Bounded:
    error = np.exp(a.value + a.error) * np.expm1(a.error)
    return Bounded(np.exp(a.value), error, a.form).rounded(EXP_ROUNDINGS)


def _sqrt(a: Bounded) -> Bounded:
    least = np.maximum(a.value - 2 * a.error, 0)
    slope = a.error / np.maximum(np.sqrt(least), a.form.tiny)
    error = np.minimum(slope, np.sqrt(a.error))
    return Bounded(np.sqrt(np.maximum(a.value, 0)), error, a.form).rounded()


def _maximum(a: Bounded, zero: Bounded) -> Bounded:
    """Cut off what is below zero; what is so in every evaluation is zero without an error."""
    certain = a.value + 2 * a.error < 0
    return Bounded(np.maximum(a.value, zero.value), np.where(certain, 0, a.error), a.form)


def _heaviside(a: Bounded, zero: Bounded) -> Bounded:
    """Return 1 above zero, else 0; where evaluations may differ in sign the error is 1."""
    open_sign = (np.abs(a.value) <= 2 * a.error) & (a.error > 0)
    return Bounded(np.heaviside(a.value, zero.value), open_sign.astype(float), a.form)


_RULES: dict[np.ufunc, Callable[..., Bounded]] = {
    np.add: _add,
    np.subtract: _subtract,
    np.multiply: _multiply,
    np.divide: _divide,
    np.matmul: _matmul,
    np.exp: _exp,
    np.sqrt: _sqrt,
    np.maximum: _maximum,
    np.heaviside: _heaviside,
}
