"""What `DataParallel` is given: checked, and in words that the ranks can compare."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b

import ml_dtypes
import numpy as np

from mpicoll.parallel.compression import Compression, HalfWire
from mpicoll.parallel.library import (
    EXPECTED,
    Array,
    is_array,
    place,
    scattered,
    to_host,
    writeable,
)


def hook_of(compress: str | Compression | None) -> tuple[Compression | None, str | None]:
    """Return the hook, and what is wrong with it."""
    if compress is None:
        return None, None
    if isinstance(compress, str):
        try:
            return HalfWire(compress), None
        except ValueError as error:
            return None, str(error)
    if not isinstance(compress, Compression):
        return None, f"compress of type {type(compress).__name__}; expected a Compression"
    return compress, None


def problem_of(
    params: object, bucket_bytes: object, op: object, ops: Collection[str]
) -> str | None:
    """Say what is wrong with arguments, of whatever type: the other ranks have to hear of it."""
    if not isinstance(params, Mapping):
        return f"params of type {type(params).__name__}; expected arrays by name"
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        return f"bucket_bytes={bucket_bytes!r}; expected a number of bytes, 1 or more"
    if not isinstance(op, str) or op not in ops:
        return f"op={op!r}; known: {', '.join(ops)}"
    found = (_unfit(name, param) for name, param in params.items())
    problem = next((problem for problem in found if problem), None)
    if problem is None and (devices := scattered(params.values())):
        problem = f"parameters on {devices}; expected those of one device"
    return problem


def described(params: Mapping[str, Array]) -> list[str]:
    """Return parameters in words that are alike where ranks cut the same buckets.

    A rank may have on its device what another has on the host.
    """
    first = next(map(place, params.values()), "")
    return [
        f"parameter {name!r} of shape {param.shape} and dtype {param.dtype}"
        + ("" if place(param) == first else ", not where the first one is")
        for name, param in params.items()
    ]


def digested(name: str, param: Array) -> str:
    dense = np.ascontiguousarray(to_host(param))
    if dense.dtype.type in (np.longdouble, np.clongdouble):  # letters have other dtypes, too
        dense = _values_only(dense)
    digest = blake2b(dense.reshape(-1).view(np.uint8).data, digest_size=8).hexdigest()
    return f"parameter {name!r} with bits of digest {digest}"


def _values_only(dense: Array) -> Array:
    """Return long doubles with the bytes set to zero that mean nothing on x86."""
    if np.finfo(np.longdouble).nmant != 63:
        return dense
    data: Array = dense.reshape(-1).view(np.uint8).reshape(-1, np.dtype("g").itemsize).copy()
    data[:, 10:] = 0
    return data


def _unfit(name: object, param: object) -> str | None:
    """Say why a parameter can have no gradient here; None if it can."""
    if not isinstance(name, str):
        return f"a parameter name of type {type(name).__name__}; names are strings"
    if not is_array(param):
        return f"parameter {name!r} of type {type(param).__name__}; expected {EXPECTED}"
    floating = param.dtype.kind in "fc" or param.dtype == ml_dtypes.bfloat16
    if not floating or not param.dtype.isnative:
        return (
            f"parameter {name!r} of dtype {param.dtype}; gradients are averaged in floating or "
            "complex types of native byte order"
        )
    if not writeable(param):
        return f"parameter {name!r} that is read-only; rank 0's values have to be written to it"
    return None
