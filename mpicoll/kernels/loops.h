/* The loops on 16-bit floats, for one instruction set.
 *
 * A level is a name, a vector width and a way to convert float16; this file is included
 * once per level, which defines before:
 *
 *   LEVEL          the suffix of its names
 *   TARGET         the attribute that turns its instructions on, or nothing
 *   LANES          float32 values per vector
 *   widen_half(from, x)   2 * LANES bytes of float16 -> vector of float32, exact
 *   narrow_half(x, to)    vector of float32 -> float16, to nearest, ties to even
 *   HALF_BY_WORDS  where no instruction does this: widen_word and narrow_word do it for
 *                  float16 in the lower halves of words
 *
 * The vectors are those of GCC and Clang, whose operators work lane by lane and whose
 * comparisons give lanes of all ones or zeros. Memory is touched through memcpy, so it may
 * be unaligned. Tails pass through a padded copy and the same vector code, so that an
 * element's bits depend neither on its place nor on the length.
 *
 * Every NaN that is made here is THE quiet NaN of its type, 0x7e00 or 0x7fc0: which
 * payload survives an addition of two NaNs is up to the processor and the compiler.
 */

#define PASTE_(name, level) name##_##level
#define PASTE(name, level) PASTE_(name, level)
#define AT(name) PASTE(name, LEVEL)
#define INLINE TARGET static inline __attribute__((always_inline))
#define LOOP TARGET static

#define BYTES (4 * LANES) /* of a vector */
#define PAIR (2 * LANES)  /* 16-bit values in a vector, and float32 values in two */

#define FLOATS AT(floats)
#define WORDS AT(words)
#define HALVES AT(halves)
#define NARROW AT(narrow_halves)
typedef float FLOATS __attribute__((vector_size(BYTES)));
typedef uint32_t WORDS __attribute__((vector_size(BYTES)));
typedef int16_t HALVES __attribute__((vector_size(BYTES)));
typedef uint16_t NARROW __attribute__((vector_size(BYTES / 2)));

/* Replaces NaN by the quiet one without sign and payload. */
INLINE void AT(canonical)(FLOATS *x)
{
    WORDS nan = (WORDS)(*x != *x);
    *x = (FLOATS)(((WORDS)*x & ~nan) | (nan & 0x7fc00000u));
}

/* The upper halves of the words become bfloat16, to nearest, ties to even. */
INLINE void AT(round_brain)(FLOATS x, WORDS *rounded)
{
    WORDS bits = (WORDS)x, nan = (WORDS)(x != x);
    bits += 0x7fffu + ((bits >> 16) & 1u);
    *rounded = (bits & ~nan) | (nan & 0x7fc00000u);
}

/* PAIR values to float32. Which of the two vectors holds which value is the kind's own
 * business, as long as put() undoes it: parting odd and even ones costs no shuffle. */
INLINE void AT(get)(enum kind kind, const char *from, FLOATS *x, FLOATS *y)
{
    if (kind == FLOAT16) {
#ifdef HALF_BY_WORDS
        WORDS words;
        memcpy(&words, from, BYTES);
        AT(widen_word)(words & 0xffffu, x);
        AT(widen_word)(words >> 16, y);
#else
        AT(widen_half)(from, x);
        AT(widen_half)(from + BYTES / 2, y);
#endif
    } else {
        WORDS both;
        memcpy(&both, from, BYTES);
        *x = (FLOATS)(both << 16);
        *y = (FLOATS)(both & 0xffff0000u);
    }
}

INLINE void AT(put)(enum kind kind, char *to, FLOATS x, FLOATS y)
{
    if (kind == FLOAT16) {
        AT(canonical)(&x);
        AT(canonical)(&y);
#ifdef HALF_BY_WORDS
        WORDS low, high;
        AT(narrow_word)(x, &low);
        AT(narrow_word)(y, &high);
        low |= high << 16;
        memcpy(to, &low, BYTES);
#else
        AT(narrow_half)(x, to);
        AT(narrow_half)(y, to + BYTES / 2);
#endif
    } else {
        WORDS low, high;
        AT(round_brain)(x, &low);
        AT(round_brain)(y, &high);
        low = (low >> 16) | (high & 0xffff0000u);
        memcpy(to, &low, BYTES);
    }
}

/* LANES values to float32 and back, in the order of memory. */
INLINE void AT(get_ordered)(enum kind kind, const char *from, FLOATS *x)
{
    if (kind == FLOAT16) {
        AT(widen_half)(from, x);
    } else {
        NARROW narrow;
        memcpy(&narrow, from, BYTES / 2);
        *x = (FLOATS)(__builtin_convertvector(narrow, WORDS) << 16);
    }
}

INLINE void AT(put_ordered)(enum kind kind, char *to, FLOATS x)
{
    if (kind == FLOAT16) {
        AT(canonical)(&x);
        AT(narrow_half)(x, to);
    } else {
        WORDS rounded;
        NARROW narrow;
        AT(round_brain)(x, &rounded);
        narrow = __builtin_convertvector(rounded >> 16, NARROW);
        memcpy(to, &narrow, BYTES / 2);
    }
}

/* The larger or smaller value, by IEEE 754-2019: NaN wins, and -0 is below +0, so that the
 * order of the operands never shows. Bits compare as integers once those of negative
 * values are turned over. */
INLINE void AT(select)(enum kind kind, enum op op, char *target, const char *a, const char *b)
{
    const int16_t infinity = kind == FLOAT16 ? 0x7c00 : 0x7f80;
    const int16_t quiet = kind == FLOAT16 ? 0x7e00 : 0x7fc0;
    HALVES x, y, first, nan;
    memcpy(&x, a, BYTES);
    memcpy(&y, b, BYTES);
    first = (x ^ ((x >> 15) & 0x7fff)) > (y ^ ((y >> 15) & 0x7fff));
    if (op == MIN)
        first = ~first;
    nan = ((x & 0x7fff) > infinity) | ((y & 0x7fff) > infinity);
    x = (x & first) | (y & ~first);
    x = (x & ~nan) | (nan & quiet);
    memcpy(target, &x, BYTES);
}

INLINE void AT(pair)(enum kind kind, enum op op, char *target, const char *a, const char *b)
{
    if (op == MAX || op == MIN) {
        AT(select)(kind, op, target, a, b);
    } else {
        FLOATS x, y, u, v;
        AT(get)(kind, a, &x, &y);
        AT(get)(kind, b, &u, &v);
        AT(put)(kind, target, op == ADD ? x + u : x * u, op == ADD ? y + v : y * v);
    }
}

/* target = a op b, each rounded; target may be a or b. */
INLINE void AT(two)(enum kind kind, enum op op, char *target, const char *a, const char *b,
                    size_t count)
{
    size_t bytes = 2 * count, i = 0;
    for (; i + BYTES <= bytes; i += BYTES)
        AT(pair)(kind, op, target + i, a + i, b + i);
    if (i < bytes) {
        char padded[2][BYTES] = {{0}};
        memcpy(padded[0], a + i, bytes - i);
        memcpy(padded[1], b + i, bytes - i);
        AT(pair)(kind, op, padded[0], padded[0], padded[1]);
        memcpy(target + i, padded[0], bytes - i);
    }
}

/* One vector of a fold: the operands of a group, upon what earlier groups have left in
 * `running`, to `running` or, after the last group, to `target`. `bytes` may be less than
 * a vector. */
INLINE void AT(fold_pair)(enum kind kind, enum op op, char *target, const char *const *operands,
                          size_t offset, size_t bytes, size_t begin, size_t end, int last,
                          float *running)
{
    FLOATS x, y, u, v;
    char padded[BYTES] = {0};
    size_t k = begin;
    if (begin > 0) {
        memcpy(&x, running, BYTES);
        memcpy(&y, running + LANES, BYTES);
    } else if (bytes == BYTES) {
        AT(get)(kind, operands[k++] + offset, &x, &y);
    } else {
        memcpy(padded, operands[k++] + offset, bytes);
        AT(get)(kind, padded, &x, &y);
    }
    for (; k < end; k++) {
        if (bytes == BYTES) {
            AT(get)(kind, operands[k] + offset, &u, &v);
        } else {
            memcpy(padded, operands[k] + offset, bytes);
            AT(get)(kind, padded, &u, &v);
        }
        x = op == ADD ? x + u : x * u;
        y = op == ADD ? y + v : y * v;
    }
    if (!last) {
        memcpy(running, &x, BYTES);
        memcpy(running + LANES, &y, BYTES);
    } else if (bytes == BYTES) {
        AT(put)(kind, target + offset, x, y);
    } else {
        AT(put)(kind, padded, x, y);
        memcpy(target + offset, padded, bytes);
    }
}

/* target = operands from the left, in float32, rounded once. Operands are read in groups,
 * so that few streams of memory are open at once; the running values stay in cache. */
INLINE void AT(fold)(enum kind kind, enum op op, char *target, const char *const *operands,
                     size_t number, size_t count)
{
    float running[PIECE];
    for (size_t low = 0; low < 2 * count; low += 2 * PIECE) {
        size_t high = low + 2 * PIECE < 2 * count ? low + 2 * PIECE : 2 * count;
        for (size_t begin = 0; begin < number; begin += GROUP) {
            size_t end = begin + GROUP < number ? begin + GROUP : number, i = low;
            for (; i + BYTES <= high; i += BYTES)
                AT(fold_pair)(kind, op, target, operands, i, BYTES, begin, end, end == number,
                              running + (i - low) / 2);
            if (i < high)
                AT(fold_pair)(kind, op, target, operands, i, high - i, begin, end, end == number,
                              running + (i - low) / 2);
        }
    }
}

INLINE void AT(scale_pair)(enum kind kind, int divide, char *target, const char *source,
                           float factor)
{
    FLOATS x, y;
    AT(get)(kind, source, &x, &y);
    AT(put)(kind, target, divide ? x / factor : x * factor, divide ? y / factor : y * factor);
}

/* target = source times or divided by factor, in float32, rounded once. */
INLINE void AT(scale)(enum kind kind, int divide, char *target, const char *source, float factor,
                      size_t count)
{
    size_t bytes = 2 * count, i = 0;
    for (; i + BYTES <= bytes; i += BYTES)
        AT(scale_pair)(kind, divide, target + i, source + i, factor);
    if (i < bytes) {
        char padded[BYTES] = {0};
        memcpy(padded, source + i, bytes - i);
        AT(scale_pair)(kind, divide, padded, padded, factor);
        memcpy(target + i, padded, bytes - i);
    }
}

INLINE void AT(widen_vector)(enum kind kind, int add, char *target, const char *source)
{
    FLOATS x, total;
    AT(get_ordered)(kind, source, &x);
    if (add) {
        memcpy(&total, target, BYTES);
        x = total + x;
    }
    AT(canonical)(&x);
    memcpy(target, &x, BYTES);
}

/* float32 target = source, or target += source. */
INLINE void AT(widen)(enum kind kind, int add, char *target, const char *source, size_t count)
{
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        AT(widen_vector)(kind, add, target + 4 * i, source + 2 * i);
    if (i < count) {
        char padded[BYTES] = {0}, narrow[BYTES / 2] = {0};
        memcpy(padded, target + 4 * i, 4 * (count - i));
        memcpy(narrow, source + 2 * i, 2 * (count - i));
        AT(widen_vector)(kind, add, padded, narrow);
        memcpy(target + 4 * i, padded, 4 * (count - i));
    }
}

INLINE void AT(narrow_vector)(enum kind kind, char *target, const char *source)
{
    FLOATS x;
    memcpy(&x, source, BYTES);
    AT(put_ordered)(kind, target, x);
}

/* target = float32 source, rounded. */
INLINE void AT(narrow)(enum kind kind, char *target, const char *source, size_t count)
{
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        AT(narrow_vector)(kind, target + 2 * i, source + 4 * i);
    if (i < count) {
        char padded[BYTES] = {0}, narrow[BYTES / 2];
        memcpy(padded, source + 4 * i, 4 * (count - i));
        AT(narrow_vector)(kind, narrow, padded);
        memcpy(target + 2 * i, narrow, 2 * (count - i));
    }
}

/* Each kind and operator becomes a loop of its own. */

#define CASE(kind, op, call) \
    if (k == kind && o == op) { \
        call; \
        return; \
    }
#define KINDS(op, call_half, call_brain) CASE(FLOAT16, op, call_half) CASE(BFLOAT16, op, call_brain)

LOOP void AT(run_two)(enum kind k, enum op o, char *target, const char *a, const char *b,
                      size_t count)
{
#define TWO(op) \
    KINDS(op, AT(two)(FLOAT16, op, target, a, b, count), \
          AT(two)(BFLOAT16, op, target, a, b, count))
    TWO(ADD)
    TWO(MULTIPLY)
    TWO(MAX)
    TWO(MIN)
#undef TWO
}

LOOP void AT(run_fold)(enum kind k, enum op o, char *target, const char *const *operands,
                       size_t number, size_t count)
{
#define FOLD(op) \
    KINDS(op, AT(fold)(FLOAT16, op, target, operands, number, count), \
          AT(fold)(BFLOAT16, op, target, operands, number, count))
    FOLD(ADD)
    FOLD(MULTIPLY)
#undef FOLD
}

LOOP void AT(run_scale)(enum kind k, int o, char *target, const char *source, float factor,
                        size_t count)
{
#define SCALE(divide) \
    KINDS(divide, AT(scale)(FLOAT16, divide, target, source, factor, count), \
          AT(scale)(BFLOAT16, divide, target, source, factor, count))
    SCALE(0)
    SCALE(1)
#undef SCALE
}

LOOP void AT(run_widen)(enum kind k, int o, char *target, const char *source, size_t count)
{
#define WIDEN(add) \
    KINDS(add, AT(widen)(FLOAT16, add, target, source, count), \
          AT(widen)(BFLOAT16, add, target, source, count))
    WIDEN(0)
    WIDEN(1)
#undef WIDEN
}

LOOP void AT(run_narrow)(enum kind k, char *target, const char *source, size_t count)
{
    if (k == FLOAT16)
        AT(narrow)(FLOAT16, target, source, count);
    else
        AT(narrow)(BFLOAT16, target, source, count);
}

#undef KINDS
#undef CASE
#undef FLOATS
#undef WORDS
#undef HALVES
#undef NARROW
#undef BYTES
#undef PAIR
#undef LOOP
#undef INLINE
#undef LEVEL
#undef TARGET
#undef LANES
#undef HALF_BY_WORDS
