"""The source of the folds that run on a device, in the C that CUDA, HIP and C share.

One kernel folds any fixed number of operands in one pass. It gives the bits of the host's
loops: integers wrap, floats are rounded after each operation, 16-bit floats accumulate in
float32 and are rounded once, NaNs and zeros come out as they do there. So do floats of 8
bits, whose conversions are tables that are taken from ml_dtypes. The tests compile the same
text with a C compiler and hold it against the host.
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
#define TABLE static __device__ const
#define FIRST ((u8)blockIdx.x * blockDim.x + threadIdx.x)
#define STRIDE ((u8)gridDim.x * blockDim.x)
#define ALIGNED __align__(16)
#else
#define KERNEL void
#define INLINE static inline
#define TABLE static const
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
/* CuPy compiles with -ftz=true, by which subnormal floats are zeros; what is written out as an
   instruction does not heed it. */
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define EXACT4(name, instruction) INLINE f4 name(f4 a, f4 b) { \
    f4 it; asm(instruction ".rn.f32 %0, %1, %2;" : "=f"(it) : "f"(a), "f"(b)); return it; }
EXACT4(plus4, "add")
EXACT4(minus4, "sub")
EXACT4(times4, "mul")
EXACT4(over4, "div")
INLINE int above4(f4 a, f4 b) {
    int it;
    asm("{ .reg .pred p; setp.gt.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }"
        : "=r"(it) : "f"(a), "f"(b));
    return it;
}
#else
INLINE f4 plus4(f4 a, f4 b) { return a + b; }
INLINE f4 minus4(f4 a, f4 b) { return a - b; }
INLINE f4 times4(f4 a, f4 b) { return a * b; }
INLINE f4 over4(f4 a, f4 b) { return a / b; }
INLINE int above4(f4 a, f4 b) { return a > b; }
#endif
INLINE int nonzero4(f4 a) { return bits4(a) << 1 != 0; }
INLINE f8 plus8(f8 a, f8 b) { return a + b; }
INLINE f8 minus8(f8 a, f8 b) { return a - b; }
INLINE f8 times8(f8 a, f8 b) { return a * b; }
INLINE f8 over8(f8 a, f8 b) { return a / b; }
INLINE int above8(f8 a, f8 b) { return a > b; }
INLINE int nonzero8(f8 a) { return a != 0; }
"""

# As on x86: a NaN that goes in comes out, the left one first, and of two equal values, which
# zeros of both signs are, the right one.
_FLOAT = """\
INLINE R quiet(R a) { return VALUE(BITS(a) | QUIET); }
INLINE R kept(R a, R b, R result) {
    if (result == result) return result;
    return a != a ? quiet(a) : b != b ? quiet(b) : VALUE(MADE);
}
INLINE R largest(R a, R b) { return a != a || ABOVE(a, b) ? a : b; }
INLINE R smallest(R a, R b) { return a != a || ABOVE(b, a) ? a : b; }
INLINE R divided(R a, R by) { return a != a ? quiet(a) : OVER(a, by); }
"""

# As in products.py: no step is fused, every NaN comes out as the quiet one.
_COMPLEX = """\
typedef struct { R real, imaginary; } T;
typedef T A;
INLINE T product(T a, T b) {
    T it;
    it.real = MINUS(TIMES(a.real, b.real), TIMES(a.imaginary, b.imaginary));
    it.imaginary = PLUS(TIMES(a.real, b.imaginary), TIMES(a.imaginary, b.real));
    return it;
}
INLINE T settled(T a) {
    if (a.real != a.real) a.real = VALUE(UNORDERED);
    if (a.imaginary != a.imaginary) a.imaginary = VALUE(UNORDERED);
    return a;
}
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

# Floats of 8 bits: WIDE has their values, as bits. What floats from STARTS[k] on, as bits, up
# to the next one are rounded to is CODES[k].
_BYTE = """\
INLINE f4 widen(u1 code) { return value4(WIDE[code]); }
INLINE u1 narrow(f4 value) {
    u4 bits = bits4(value);
    int low = 0, high = (int)sizeof(CODES);
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (STARTS[middle] <= bits) low = middle;
        else high = middle;
    }
    return CODES[low];
}
"""

_FOLD = """\
struct ALIGNED pack {{ T v[16 / sizeof(T)]; }};
KERNEL fold(T *target, {parameters}, u8 count) {{
    u8 i, packs;
    count /= UNITS;
    packs = ({addresses}) % 16 ? 0 : count * sizeof(T) / 16;
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
_FLOAT_LOGIC = {
    "LAND": "NONZERO(a) && NONZERO(b)",
    "LOR": "NONZERO(a) || NONZERO(b)",
    "LXOR": "NONZERO(a) != NONZERO(b)",
}
_FLOATS = {
    "SUM": "kept(a, b, PLUS(a, b))",
    "PROD": "kept(a, b, TIMES(a, b))",
    "MAX": "largest(a, b)",
    "MIN": "smallest(a, b)",
    **_FLOAT_LOGIC,
}


def supported(operator: str, dtype: DType) -> bool:
    """Whether there is a fold of this operator for items of this type."""
    return bool(_definitions(operator, dtype, 0))


def unit(dtype: DType) -> int:
    """Return the bytes of what a kernel is told the count of; a complex number is two."""
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


def _half(dtype: DType) -> str:
    if dtype == np.float16:
        return "float16"
    return "bfloat16" if dtype == ml_dtypes.bfloat16 else ""


def _byte(dtype: DType) -> bool:
    """Whether ``dtype`` is a float of 8 bits."""
    return dtype.itemsize == 1 and dtype.name.startswith("float8_")


def _definitions(operator: str, dtype: DType, mean_of: int) -> list[str]:
    """Return the types and operations of a fold; nothing where there is none."""
    half = _half(dtype)
    # NumPy calls some extension types floats; the host takes logic of those only.
    if (half or _byte(dtype)) and operator in _LOGIC and dtype.kind != "f":
        return []
    if half:
        return _of_halves(operator, half, mean_of)
    if _byte(dtype):
        return _of_bytes(operator, dtype, mean_of)
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
            *_PLAIN,
        ]
    real = {np.float32: 4, np.float64: 8, np.complex64: 4, np.complex128: 8}.get(dtype.type, 0)
    if not real:
        return []
    if dtype.kind == "c" and operator == "PROD":
        return [
            *_real(real),
            _COMPLEX,
            "#define STEP(a, b) product(a, b)",
            "#define IN(a) (a)\n#define OUT(a) settled(a)\n#define UNITS 2",
        ]
    if operator not in (("SUM",) if dtype.kind == "c" else _FLOATS):
        return []
    return [
        *_real(real),
        "typedef R T; typedef R A;",
        f"#define STEP(a, b) ((T)({_FLOATS[operator]}))",
        "#define QUOTIENT(a) divided(a, (T)size)",
        *_PLAIN,
    ]


#: Operands are folded as they are.
_PLAIN = ["#define IN(a) (a)\n#define OUT(a) (a)\n#define UNITS 1"]


def _real(size: int) -> list[str]:
    """Return the type R, of ``size`` bytes, and what is done with it."""
    quiet, made, unordered = {
        4: ("0x400000u", "0xffc00000u", "0x7fc00000u"),
        8: ("0x8000000000000ull", "0xfff8000000000000ull", "0x7ff8000000000000ull"),
    }[size]
    return [
        f"typedef f{size} R;",
        f"#define VALUE value{size}\n#define BITS bits{size}",
        *_arithmetic(size),
        f"#define QUIET {quiet}\n#define MADE {made}\n#define UNORDERED {unordered}",
        _FLOAT,
    ]


def _arithmetic(size: int) -> list[str]:
    """Return what is done with floats of ``size`` bytes, subnormal ones too."""
    names = ("plus", "minus", "times", "over", "above", "nonzero")
    return [f"#define {name.upper()} {name}{size}" for name in names]


def _of_halves(operator: str, half: str, mean_of: int) -> list[str]:
    steps = {"SUM": "PLUS(a, b)", "PROD": "TIMES(a, b)", **_FLOAT_LOGIC}
    if operator in steps:
        out = f"OVER(a, {mean_of}.0f)" if mean_of else "a"
        return [
            *_arithmetic(4),
            _HALF[half],
            "typedef u2 T; typedef f4 A;",
            f"#define STEP(a, b) ((A)({steps[operator]}))",
            "#define QUOTIENT(a) narrow(OVER(widen(a), (f4)size))",
            f"#define IN(a) widen(a)\n#define OUT(a) narrow({out})\n#define UNITS 1",
        ]
    if operator in ("MAX", "MIN"):
        return [
            *_arithmetic(4),
            _HALF[half],
            f"#define BEYOND {'' if operator == 'MAX' else '-'}0x10000",
            _ORDERED_HALF,
            "typedef u2 T; typedef i4 A;",
            f"#define STEP(a, b) ({_INTEGERS[operator]})",
            "#define QUOTIENT(a) narrow(OVER(widen(a), (f4)size))",
            "#define IN(a) ordered(a)\n#define OUT(a) unordered(a)\n#define UNITS 1",
        ]
    return []


def _of_bytes(operator: str, dtype: DType, mean_of: int) -> list[str]:
    if operator in ("MAX", "MIN"):
        # The bits of an operand, also where they are one of several NaNs.
        above = "widen(a), widen(b)" if operator == "MAX" else "widen(b), widen(a)"
        first = f"widen(a) != widen(a) || ABOVE({above})"
        return [
            *_arithmetic(4),
            _tables(dtype),
            "typedef u1 T; typedef u1 A;",
            f"#define STEP(a, b) ({first} ? (a) : (b))",
            *_PLAIN,
        ]
    if operator in _FLOATS:
        mean = f"divided(a, {mean_of}.0f)" if mean_of else "a"
        return [
            _tables(dtype),
            *_real(4),
            "typedef u1 T; typedef R A;",
            f"#define STEP(a, b) ((A)({_FLOATS[operator]}))",
            "#define QUOTIENT(a) narrow(divided(widen(a), (R)size))",
            f"#define IN(a) widen(a)\n#define OUT(a) narrow({mean})\n#define UNITS 1",
        ]
    return []


@cache
def _tables(dtype: DType) -> str:
    """Return the conversions of a float of 8 bits, as ml_dtypes has them."""
    wide = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32).view(np.uint32)
    # Values, and what lies midway between two, have zeros in the lower half of a float32. So
    # what it is rounded to changes at or just behind a number that has, and nowhere else.
    short = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = np.stack([short, short + 1], axis=1).reshape(-1)
    with np.errstate(all="ignore"):
        codes = bits.view(np.float32).astype(dtype).view(np.uint8)
    first = np.flatnonzero(np.diff(codes, prepend=~codes[:1]))
    return "\n".join(
        [
            f"TABLE u4 WIDE[] = {{{_listed(wide)}}};",
            f"TABLE u4 STARTS[] = {{{_listed(bits[first])}}};",
            f"TABLE u1 CODES[] = {{{_listed(codes[first])}}};",
            _BYTE,
        ]
    )


def _listed(numbers: Any) -> str:
    return ",".join(f"{number:#x}" for number in numbers.tolist())


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
