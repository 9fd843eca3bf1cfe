from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

# Anything with the buffer protocol will do; arrays are what it gets.
_Array = npt.NDArray[Any]

def levels() -> dict[str, int]: ...
def narrow(level: int, kind: int, unused: int, target: _Array, source: _Array, /) -> None: ...
def reduce(
    level: int, kind: int, op: int, target: _Array, operands: Sequence[_Array], /
) -> None: ...
def scale(
    level: int, kind: int, divide: int, target: _Array, source: _Array, factor: float, /
) -> None: ...
def widen(level: int, kind: int, add: int, target: _Array, source: _Array, /) -> None: ...
