"""The source of the folds that run on a device, in the C that CUDA, HIP and C share.

One kernel folds any fixed number of operands in one pass. It gives the bits of the host's
loops: integers wrap, floats are rounded after each operation, 16-bit floats accumulate in
float32 and are rounded once, NaNs and zeros come out as they do there. The tests compile
the same text with a C compiler and hold it against the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

DType = np.dtype[Any]

_PRELUDE = """\
#if defined(__CUDACC__) || defined(__CUDACC_RTC__) || defined(__HIPCC__) || defined(__HIPCC_RTC__)
#define KERNEL extern "C" __global__ void
#define INLINE static __device__ __forceinline__
#define FIRST ((u8)blockIdx.x * blockDim.x + threadIdx.x)
#define STRIDE ((u8)gridDim.x * blockDim.x)
#define ALIGNED __align__(16)
#else
#define KERNEL void
#define INLINE static inline
#define FIRST 0
#define STRIDE 1
#define ALIGNED __attribute__((aligned(16)))
#endif
typedef signed char i1; typedef short i2; typedef int i4; typedef long long i8;
typedef unsigned char u1; typedef unsigned short u2; typedef unsigned u4;
typedef unsigned long long u8; typedef float f4; typedef double f8;
union word4 { f4 value; u4 bits; };
union word8 { f8 value; u8 bits; };
INLINE f4 value4(u4 bits) { union word4 it; it.bits = bits; return it.value; }
INLINE u4 bits4(f4 value) { union word4 it; it.value = value; return it.bits; }
INLINE f8 value8(u8 bits) { union word8 it; it.bits = bits; return it.value; }
INLINE u8 bits8(f8 value) { union word8 it; it.value = value; return it.bits; }
"""

# As on x86: a NaN that goes in comes out, the left one first, and of two equal values, which
# zeros of both signs are, the right one.
_FLOAT = """\
INLINE T quiet(T a) { return VALUE(BITS(a) | QUIET); }
INLINE T kept(T a, T b, T result) {
    if (result == result) return result;
    return a != a ? quiet(a) : b != b ? quiet(b) : VALUE(MADE);
}
INLINE T largest(T a, T b) { return a != a || a > b ? a : b; }
INLINE T smallest(T a, T b) { return a != a || a < b ? a : b; }
"""

# Halves by their bits, to the nearest, ties to even; every NaN comes out as the quiet one.
_HALF = {
    "float16": """\
#define INFINITE 0x7c00
#define UNORDERED 0x7e00
INLINE f4 widen(u2 half) {
    u4 sign = (u4)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return value4(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400) return value4(sign | (rest << 13) + 0x38000000);
    return value4(sign | bits4((f4)rest * 5.9604644775390625e-8f));
}
INLINE u2 narrow(f4 value) {
    u4 bits = bits4(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return UNORDERED;
    if (rest >= 0x477ff000) return (u2)(sign | INFINITE);
    if (rest < 0x38800000) {  /* below 2**-14: adding 0.5 leaves multiples of 2**-24 */
        f4 aligned = value4(rest) + 0.5f;
        return (u2)(sign | (bits4(aligned) - 0x3f000000));
    }
    return (u2)(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}
""",
    "bfloat16": """\
#define INFINITE 0x7f80
#define UNORDERED 0x7fc0
INLINE f4 widen(u2 half) { return value4((u4)half << 16); }
INLINE u2 narrow(f4 value) {
    u4 bits = bits4(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return UNORDERED;
    return (u2)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
""",
}

# Ordered as integers, NaN beyond all others.
_ORDERED_HALF = """\
INLINE i4 ordered(u2 half) {
    i4 rest = half & 0x7fff;
    if (rest > INFINITE) return BEYOND;
    return half & 0x8000 ? -1 - rest : rest;
}
INLINE u2 unordered(i4 key) {
    return (u2)(key == BEYOND ? UNORDERED : key < 0 ? 0x8000 | (-1 - key) : key);
}
"""

_FOLD = """\
struct ALIGNED pack {{ T v[16 / sizeof(T)]; }};
KERNEL fold(T *target, {parameters}, u8 count) {{
    u8 i, packs = ({addresses}) % 16 ? 0 : count * sizeof(T) / 16;
    for (i = FIRST; i < packs; i += STRIDE) {{
        A total[16 / sizeof(T)];
        struct pack at = ((const struct pack *)a0)[i];
        int k;
        for (k = 0; k < (int)(16 / sizeof(T)); k++) total[k] = IN(at.v[k]);
{packed}
        for (k = 0; k < (int)(16 / sizeof(T)); k++) at.v[k] = OUT(total[k]);
        ((struct pack *)target)[i] = at;
    }}
    for (i = packs * (16 / sizeof(T)) + FIRST; i < count; i += STRIDE) {{
        A total = IN(a0[i]);
{single}
        target[i] = OUT(total);
    }}
}}
"""

_DIVIDE = """\
KERNEL divide(T *target, u8 count, i8 size) {
    for (u8 i = FIRST; i < count; i += STRIDE) target[i] = QUOTIENT(target[i]);
}
"""

_GATHER = """\
KERNEL gather(u1 *target, const u1 *source, const i8 *positions, i8 extent, u8 each, u8 count) {
    for (u8 i = FIRST; i < count * each; i += STRIDE) {
        i8 at = positions[i % each];
        target[i] = at < NOWHERE ? 0 : source[(i8)(i / each) * extent + at];
    }
}
KERNEL scatter(u1 *target, const u1 *source, const i8 *positions, i8 extent, u8 each, u8 count) {
    for (u8 i = FIRST; i < count * each; i += STRIDE) {
        i8 at = positions[i % each];
        if (at >= NOWHERE) target[(i8)(i / each) * extent + at] = source[i];
    }
}
"""

_LOGIC = {
    "LAND": "(a) != 0 && (b) != 0",
    "LOR": "(a) != 0 || (b) != 0",
    "LXOR": "((a) != 0) != ((b) != 0)",
}
_INTEGERS = {
    "SUM": "(u8)(a) + (u8)(b)",
    "PROD": "(u8)(a) * (u8)(b)",
    "MAX": "(a) > (b) ? (a) : (b)",
    "MIN": "(a) < (b) ? (a) : (b)",
    "BAND": "(a) & (b)",
    "BOR": "(a) | (b)",
    "BXOR": "(a) ^ (b)",
    **_LOGIC,
}
_FLOATS = {
    "SUM": "kept(a, b, (a) + (b))",
    "PROD": "kept(a, b, (a) * (b))",
    "MAX": "largest(a, b)",
    "MIN": "smallest(a, b)",
}


def supported(operator: str, dtype: DType) -> bool:
    """Whether there is a fold of this operator for items of this type."""
    return bool(_definitions(operator, dtype, 0))


def unit(dtype: DType) -> int:
    """Return the bytes of what a kernel counts; a complex number is two of them."""
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


def _half(dtype: DType) -> str:
    if dtype == np.float16:
        return "float16"
    return "bfloat16" if dtype == ml_dtypes.bfloat16 else ""


def _definitions(operator: str, dtype: DType, mean_of: int) -> list[str]:
    """Return the types and operations of a fold; nothing where there is none."""
    half = _half(dtype)
    if half:
        return _of_halves(operator, half, mean_of)
    if dtype.kind in "iub":
        known = _LOGIC if dtype.kind == "b" else _INTEGERS
        name = "u1" if dtype.kind == "b" else f"{dtype.kind}{dtype.itemsize}"
        wide = "u8" if dtype.kind == "u" else "i8"
        if operator not in known:
            return []
        # One operand is 0 or 1 after a fold only, as in a loop of two at a time.
        return [
            f"typedef {name} T; typedef {name} A;",
            f"#define STEP(a, b) ((T)({known[operator]}))",
            f"#define QUOTIENT(a) ((T)(({wide})(a) / ({wide})size))",
            "#define IN(a) (a)\n#define OUT(a) (a)",
        ]
    real = {"f4": 4, "f8": 8, "c8": 4, "c16": 8}.get(f"{dtype.kind}{dtype.itemsize}", 0)
    if not real or dtype.char in "gG" or operator not in _FLOATS:
        return []
    if dtype.kind == "c" and operator != "SUM":
        return []
    quiet, made = {
        4: ("0x400000u", "0xffc00000u"),
        8: ("0x8000000000000ull", "0xfff8000000000000ull"),
    }[real]
    return [
        f"typedef f{real} T; typedef f{real} A;",
        f"#define VALUE value{real}\n#define BITS bits{real}",
        f"#define QUIET {quiet}\n#define MADE {made}",
        _FLOAT,
        f"#define STEP(a, b) ({_FLOATS[operator]})",
        "#define QUOTIENT(a) ((a) != (a) ? quiet(a) : (a) / (T)size)",
        "#define IN(a) (a)\n#define OUT(a) (a)",
    ]


def _of_halves(operator: str, half: str, mean_of: int) -> list[str]:
    if operator in ("SUM", "PROD"):
        sign = "+" if operator == "SUM" else "*"
        mean = f" / {mean_of}.0f" if mean_of else ""
        return [
            _HALF[half],
            "typedef u2 T; typedef f4 A;",
            f"#define STEP(a, b) ((a) {sign} (b))",
            "#define QUOTIENT(a) narrow(widen(a) / (f4)size)",
            f"#define IN(a) widen(a)\n#define OUT(a) narrow((a){mean})",
        ]
    if operator in ("MAX", "MIN"):
        return [
            _HALF[half],
            f"#define BEYOND {'' if operator == 'MAX' else '-'}0x10000",
            _ORDERED_HALF,
            "typedef u2 T; typedef i4 A;",
            f"#define STEP(a, b) ({_INTEGERS[operator]})",
            "#define QUOTIENT(a) narrow(widen(a) / (f4)size)",
            "#define IN(a) ordered(a)\n#define OUT(a) unordered(a)",
        ]
    return []


@cache
def fold_source(operator: str, dtype: DType, operands: int, mean_of: int = 0) -> str:
    """Return the source of ``fold(target, a0, ..., count)``, which counts units.

    With ``mean_of``, of halves only, the fold is divided by it before it is rounded.
    """
    names = [f"a{number}" for number in range(operands)]
    each = "for (k = 0; k < (int)(16 / sizeof(T)); k++)"
    packed = [
        f"        at = ((const struct pack *){name})[i];\n"
        f"        {each} total[k] = STEP(total[k], IN(at.v[k]));"
        for name in names[1:]
    ]
    single = [f"        total = STEP(total, IN({name}[i]));" for name in names[1:]]
    body = _FOLD.format(
        parameters=", ".join(f"const T *{name}" for name in names),
        addresses=" | ".join(f"(u8){name}" for name in ("target", *names)),
        packed="\n".join(packed),
        single="\n".join(single),
    )
    return _joined(_definitions(operator, dtype, mean_of), body)


@cache
def divide_source(dtype: DType) -> str:
    """Return the source of ``divide(target, count, size)``, which counts units."""
    return _joined(_definitions("SUM", dtype, 0), _DIVIDE)


@cache
def move_source(nowhere: int) -> str:
    """Return the source of ``gather`` and ``scatter``, by bytes; see `backend.Layout`."""
    return _joined([f"#define NOWHERE ({nowhere // 2})"], _GATHER)


def _joined(definitions: Sequence[str], body: str) -> str:
    return "\n".join([_PRELUDE, *definitions, body])
