"""A module that stands in for CuPy where arrays are computed with: NumPy's functions, deferred.

Its arrays lie in poisoned memory, and what is done to them is queued on the current stream of
the deferred device, as CuPy queues it. What takes values to the host waits: `asnumpy`, `float`,
`int`, `bool`. As CuPy it refuses to mix its arrays with NumPy's, and NumPy's functions refuse
its arrays (CuPy dispatches those; what relies on that is better written for the library).
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from weakref import finalize

import deferred
import numpy as np
from deferred import BACKEND

#: What CuPy 14.2 has under the same name and mpicoll may use.
_NAMES = """abs add all amax amin any argmax argsort ascontiguousarray bincount broadcast_to
clip concatenate copyto cumsum diff divide dot exp expand_dims flatnonzero log matmul max maximum
mean min minimum moveaxis multiply nonzero repeat reshape rint searchsorted sign sqrt square stack
subtract sum swapaxes take tanh tile transpose where zeros_like empty_like ones_like
full_like"""
_FUNCTIONS = set(_NAMES.split())
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_VIEWS = {"broadcast_to", "moveaxis", "reshape", "swapaxes", "transpose", "expand_dims"}


def _queue(work: Callable[[], None]) -> None:
    def quiet() -> None:
        with np.errstate(all="ignore"):
            work()

    BACKEND._add(BACKEND.stream, quiet)


def _wait() -> None:
    BACKEND.over(BACKEND.record(BACKEND.stream), True)


def _each(given: Any, change: Callable[[ndarray], Any]) -> Any:
    """Return arguments with the arrays among them changed; refuses NumPy's."""
    if isinstance(given, ndarray):
        return change(given)
    if isinstance(given, np.ndarray):
        raise TypeError(f"unsupported type {type(given)}: an array of the host, as CuPy says")
    if isinstance(given, list | tuple):
        return type(given)(_each(one, change) for one in given)
    if isinstance(given, dict):
        return {name: _each(one, change) for name, one in given.items()}
    return given


def _model(array: ndarray) -> Any:
    """Return an array of the host of that form, to see what a function makes of it."""
    return np.ones(array.shape, array.dtype)


def _index(array: ndarray) -> Any:
    """Return an index of that form; a mask decides the shape, so CuPy waits for it too."""
    return array.get() if array.dtype == np.bool_ else np.zeros(array.shape, array.dtype)


def _call(
    function: Callable[..., Any], *args: Any, out: ndarray | None = None, **named: Any
) -> Any:
    """Queue a function; what it returns has the form that it has for ones."""
    given, by_name = _each(args, lambda one: one.memory), _each(named, lambda one: one.memory)
    with np.errstate(all="ignore"):
        model = function(*_each(args, _model), **_each(named, _model))
    if out is not None:
        target = out.memory
        if not np.can_cast(np.asarray(model).dtype, target.dtype, "same_kind"):
            raise TypeError(f"cannot cast {np.asarray(model).dtype} to {target.dtype}")
        _queue(lambda: np.copyto(target, function(*given, **by_name), casting="same_kind"))
        return out
    model = np.asarray(model)
    made = empty(model.shape, model.dtype)
    filled = made.memory
    _queue(lambda: filled.__setitem__(..., function(*given, **by_name)))
    return made


def _known(name: str) -> Callable[..., Any]:
    """Return NumPy's function; what adds does so backwards: CuPy has an order of its own too."""
    function: Callable[..., Any] = getattr(np, name)
    if name not in ("sum", "mean"):
        return function

    def backwards(values: Any, axis: Any = None, **named: Any) -> Any:
        return function(np.ascontiguousarray(np.flip(values, axis)), axis, **named)

    return backwards


class _Flags(NamedTuple):
    c_contiguous: bool
    f_contiguous: bool
    owndata: bool


class _Room:
    """Memory that arrays share. When the last is gone, whoever comes next may have it.

    So it is with CuPy's pool: work that was queued on the stream before is still right, but
    what others do with the memory, such as a request that does not keep its array, is not.
    """

    _left: ClassVar[deque[tuple[Any, Any]]] = deque()

    def __init__(self, nbytes: int) -> None:
        while self._left:
            stream, memory = self._left.popleft()
            BACKEND._add(stream, functools.partial(memory.fill, deferred.POISON))
        self.bytes = BACKEND.poison(nbytes)
        finalize(self, self._left.append, (BACKEND.stream, self.bytes)).atexit = False


class ndarray:
    """An array of the device over a view of its memory."""

    __array_ufunc__ = None

    def __init__(self, memory: Any, device: int = 0, room: object = None) -> None:
        """Take a view, and the room that it is in."""
        self.memory, self.device, self.room = memory, SimpleNamespace(id=device), room

    def _within(self, memory: Any) -> ndarray:
        """Return an array over a part of the memory."""
        return ndarray(memory, self.device.id, self.room)

    # -- form -------------------------------------------------------------------------

    shape = property(lambda self: self.memory.shape)
    dtype = property(lambda self: self.memory.dtype)
    ndim = property(lambda self: self.memory.ndim)
    size = property(lambda self: self.memory.size)
    nbytes = property(lambda self: self.memory.nbytes)
    itemsize = property(lambda self: self.memory.itemsize)
    strides = property(lambda self: self.memory.strides)
    T = property(lambda self: self._within(self.memory.T))

    @property
    def flags(self) -> Any:
        """Those that CuPy has; there is none to be set."""
        flags = self.memory.flags
        return _Flags(flags.c_contiguous, flags.f_contiguous, False)

    @property
    def data(self) -> Any:
        """Where it lies."""
        return SimpleNamespace(ptr=deferred.address_of(self.memory))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        dense = self.memory.flags.c_contiguous
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (deferred.address_of(self.memory) if self.size else 0, False),
            "strides": None if dense else self.strides,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.id

    def __len__(self) -> int:
        return len(self.memory)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[at] for at in range(len(self)))

    # -- to the host ------------------------------------------------------------------

    def get(self) -> Any:
        """Return a copy on the host, once what is queued is done."""
        found: list[Any] = []
        _queue(lambda: found.append(self.memory.copy()))
        _wait()
        return found[0]

    def item(self) -> Any:
        """Return the only element."""
        return self.get().item()

    def tolist(self) -> Any:
        """Return the elements."""
        return self.get().tolist()

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("implicit conversion to a NumPy array is not allowed; use .get()")

    def __reduce__(self) -> Any:
        """Pickle by way of the host."""
        return asarray, (self.get(),)

    __array_function__ = None
    __hash__ = None  # type: ignore[assignment]

    # -- views and copies -------------------------------------------------------------

    def _viewed(self, function: Callable[[Any], Any]) -> ndarray:
        """Return a view where there is one, else a copy, which is queued."""
        seen = function(self.memory)
        if np.may_share_memory(seen, self.memory) or not seen.size:
            return self._within(seen)
        made = empty(seen.shape, seen.dtype)
        source, target = self.memory, made.memory
        _queue(lambda: target.__setitem__(..., function(source)))
        return made

    def view(self, dtype: Any = None) -> ndarray:
        """Return the same bytes."""
        seen = self.memory.view() if dtype is None else self.memory.view(dtype)
        return self._within(seen)

    def reshape(self, *shape: Any) -> ndarray:
        """Return another shape."""
        return self._viewed(lambda memory: memory.reshape(*shape))

    def ravel(self) -> ndarray:
        """Return one dimension."""
        return self.reshape(-1)

    def copy(self) -> ndarray:
        """Queue a copy."""
        return _call(np.copy, self)

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        """Queue a conversion."""
        if not copy and self.dtype == dtype:
            return self
        return _call(lambda values: values.astype(dtype), self)

    def fill(self, value: Any) -> None:
        """Queue a fill."""
        self[...] = value

    @staticmethod
    def _basic(key: Any) -> bool:
        parts = key if isinstance(key, tuple) else (key,)
        return not any(isinstance(one, ndarray | np.ndarray | list) for one in parts)

    def __getitem__(self, key: Any) -> ndarray:
        if self._basic(key):
            # The ellipsis keeps what has no dimensions an array.
            parts = key if isinstance(key, tuple) else (key,)
            whole = parts if any(one is ... for one in parts) else (*parts, ...)
            return self._within(self.memory[whole])
        model, indices = self.memory[_each(key, _index)], _each(key, lambda one: one.memory)
        made = empty(model.shape, model.dtype)
        source, target = self.memory, made.memory
        _queue(lambda: target.__setitem__(..., source[indices]))
        return made

    def __setitem__(self, key: Any, value: Any) -> None:
        source = _each(value, lambda one: one.memory)
        indices = _each(key, lambda one: one.memory)
        shape = np.shape(self.memory[_each(key, _index)])
        if np.broadcast_shapes(shape, np.shape(source)) != shape:
            raise ValueError(f"shape {np.shape(source)} does not fit {shape}")
        memory = self.memory
        _queue(lambda: memory.__setitem__(indices, source))

    # -- reductions -------------------------------------------------------------------

    def _method(name: str) -> Any:  # type: ignore[misc]
        def method(self: ndarray, *args: Any, **named: Any) -> Any:
            return _call(_known(name), self, *args, **named)

        return method

    sum, mean, max, min, all, any, cumsum, argsort, argmax = map(  # type: ignore[var-annotated]
        _method, ("sum", "mean", "max", "min", "all", "any", "cumsum", "argsort", "argmax")
    )


def _operators() -> None:
    def forward(function: Any) -> Any:
        return lambda self, other: _call(function, self, other)

    def backward(function: Any) -> Any:
        return lambda self, other: _call(lambda a, b: function(b, a), self, other)

    def within(function: Any) -> Any:
        return lambda self, other: _call(function, self, other, out=self)

    for name in _ARITHMETIC:
        known = {"and": "and_", "or": "or_"}
        function = getattr(operator, known.get(name, name))
        setattr(ndarray, f"__{name}__", forward(function))
        setattr(ndarray, f"__r{name}__", backward(function))
        setattr(ndarray, f"__i{name}__", within(function))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(ndarray, f"__{name}__", forward(getattr(operator, name)))
    for name, function in (("neg", operator.neg), ("invert", operator.invert), ("abs", abs)):
        setattr(ndarray, f"__{name}__", lambda self, function=function: _call(function, self))


_operators()


# -- the module -------------------------------------------------------------------------------


def empty(shape: Any, dtype: Any = float) -> ndarray:
    """Return poison."""
    model = np.empty(shape, dtype)
    room = _Room(model.nbytes)
    return ndarray(room.bytes.view(model.dtype).reshape(model.shape), room=room)


def full(shape: Any, value: Any, dtype: Any = None) -> ndarray:
    """Queue a fill of new memory."""
    made = empty(shape, np.asarray(value).dtype if dtype is None else dtype)
    made[...] = value
    return made


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    """Queue a fill with zeros."""
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    """Queue a fill with ones."""
    return full(shape, 1, dtype)


def arange(*args: Any, **named: Any) -> ndarray:
    """Queue a range."""
    return asarray(np.arange(*args, **named))


def asarray(given: Any, dtype: Any = None) -> ndarray:
    """Return an array of the device; what is on the host is copied, before this returns."""
    if isinstance(given, ndarray):
        return given if dtype is None else given.astype(dtype, copy=False)
    data = np.array(given, dtype)
    made = empty(data.shape, data.dtype)
    target = made.memory
    _queue(lambda: target.__setitem__(..., data))
    return made


array = asarray


def asnumpy(given: Any) -> Any:
    """Return an array of the host."""
    return given.get() if isinstance(given, ndarray) else np.asarray(given)


def copyto(target: ndarray, source: Any, casting: str = "same_kind") -> None:
    """Queue a copy."""
    taken, filled = _each(source, lambda one: one.memory), target.memory
    _queue(lambda: np.copyto(filled, taken, casting=casting))  # type: ignore[arg-type]


def ascontiguousarray(given: Any, dtype: Any = None) -> ndarray:
    """Return it in C order, with one dimension at least."""
    made = asarray(given, dtype)
    if not made.memory.flags.c_contiguous:
        made = made.copy()
    return made.reshape(1) if made.ndim == 0 else made


def __getattr__(name: str) -> Any:
    if name not in _FUNCTIONS:
        raise AttributeError(f"cupy (as far as it is stood in for) has no {name!r}")
    function = _known(name)
    if name in _VIEWS:
        return lambda array, *args, **named: array._viewed(
            lambda memory: function(memory, *args, **named)
        )
    return lambda *args, **named: _call(function, *args, **named)
