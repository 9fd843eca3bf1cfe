/* The instruction sets, and what each needs to convert float16; the loops are in loops.h. */

#include <float.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "float32 arithmetic has excess precision here"
#endif

enum kind { FLOAT16, BFLOAT16, KINDS_END };
enum op { ADD, MULTIPLY, MAX, MIN, OPS_END };

#define PIECE 1024 /* values per piece of a fold */
#define GROUP 8    /* operands that a fold reads at once */

/* GCC remarks on vectors as arguments, which have no fixed convention; all are inlined. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

/* ---- portable ---- */

#define LEVEL portable
#define TARGET
#define LANES 4
#define HALF_BY_WORDS

typedef float portable_float __attribute__((vector_size(16)));
typedef int32_t portable_word __attribute__((vector_size(16)));
typedef uint32_t portable_bits __attribute__((vector_size(16)));
typedef uint16_t portable_half __attribute__((vector_size(8)));

static inline __attribute__((always_inline)) void widen_word_portable(portable_bits bits,
                                                                      portable_float *x)
{
    /* A subnormal's mantissa is put under an exponent whose unit it is, which is then
     * subtracted: no float32 subnormal is met, so flush-to-zero modes do no harm. */
    const portable_word magic = {113 << 23, 113 << 23, 113 << 23, 113 << 23};
    const portable_word half = (portable_word)bits, sign = (half & 0x8000) << 16;
    const portable_word magnitude = (half & 0x7fff) << 13;
    const portable_word small = magnitude < (0x0400 << 13);
    const portable_word large = magnitude >= (0x7c00 << 13);
    const portable_word usual = magnitude + (112 << 23) + (large & (112 << 23));
    const portable_float tiny = (portable_float)(magnitude | magic) - (portable_float)magic;
    *x = (portable_float)(sign | (small & (portable_word)tiny) | (~small & usual));
}

static inline __attribute__((always_inline)) void narrow_word_portable(portable_float x,
                                                                       portable_bits *half)
{
    /* Adding a number whose unit is that of the subnormals rounds to them. */
    const portable_word magic = {126 << 23, 126 << 23, 126 << 23, 126 << 23};
    const portable_word magnitude = (portable_word)x & 0x7fffffff;
    const portable_word sign = ((portable_word)x >> 16) & 0x8000;
    const portable_word nan = magnitude > (255 << 23);
    const portable_word large = magnitude >= (143 << 23);
    const portable_word small = magnitude < (113 << 23);
    const portable_word tiny =
        (portable_word)((portable_float)magnitude + (portable_float)magic) - magic;
    const portable_word usual =
        (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const portable_word finite = (small & tiny) | (~small & usual);
    *half = (portable_bits)(sign | (large & (0x7c00 | (nan & 0x200))) | (~large & finite));
}

static inline __attribute__((always_inline)) void widen_half_portable(const char *from,
                                                                      portable_float *x)
{
    portable_half half;
    memcpy(&half, from, sizeof half);
    widen_word_portable(__builtin_convertvector(half, portable_bits), x);
}

static inline __attribute__((always_inline)) void narrow_half_portable(portable_float x, char *to)
{
    portable_bits word;
    portable_half half;
    narrow_word_portable(x, &word);
    half = __builtin_convertvector(word, portable_half);
    memcpy(to, &half, sizeof half);
}
#include "loops.h"

/* ---- x86-64 ---- */

#if defined(__x86_64__)
#define HAS_X86 1
#include <cpuid.h>
#include <immintrin.h>

#define ROUNDING (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

#define LEVEL avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define LANES 8
TARGET static inline __attribute__((always_inline)) void widen_half_avx2(const char *from,
                                                                         __m256 *x)
{
    *x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)from));
}
TARGET static inline __attribute__((always_inline)) void narrow_half_avx2(__m256 x, char *to)
{
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_cvtps_ph(x, ROUNDING));
}
#include "loops.h"

#define LEVEL avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define LANES 16
TARGET static inline __attribute__((always_inline)) void widen_half_avx512(const char *from,
                                                                           __m512 *x)
{
    *x = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)from));
}
TARGET static inline __attribute__((always_inline)) void narrow_half_avx512(__m512 x, char *to)
{
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_cvtps_ph(x, ROUNDING));
}
#include "loops.h"

static int runs_avx2(void)
{
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    /* Not every compiler's __builtin_cpu_supports knows F16C. */
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static int runs_avx512(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

/* ---- AArch64 ---- */

#if defined(__aarch64__) && !defined(__AARCH64EB__)
#define HAS_NEON 1
#include <arm_neon.h>

#define LEVEL neon
#define TARGET
#define LANES 4
typedef float neon_float __attribute__((vector_size(16)));
static inline __attribute__((always_inline)) void widen_half_neon(const char *from, neon_float *x)
{
    uint16x4_t half;
    memcpy(&half, from, 8);
    *x = (neon_float)vcvt_f32_f16(vreinterpret_f16_u16(half));
}
static inline __attribute__((always_inline)) void narrow_half_neon(neon_float x, char *to)
{
    uint16x4_t half = vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x));
    memcpy(to, &half, 8);
}
#include "loops.h"
#endif

/* ---- levels, best first ---- */

static int always(void) { return 1; }

struct level {
    const char *name;
    int (*runs)(void);
    void (*two)(enum kind, enum op, char *, const char *, const char *, size_t);
    void (*fold)(enum kind, enum op, char *, const char *const *, size_t, size_t);
    void (*scale)(enum kind, int, char *, const char *, float, size_t);
    void (*widen)(enum kind, int, char *, const char *, size_t);
    void (*narrow)(enum kind, char *, const char *, size_t);
};

#define ENTRY(name, runs) \
    {#name, runs, run_two_##name, run_fold_##name, run_scale_##name, run_widen_##name, \
     run_narrow_##name}

static const struct level LEVELS[] = {
#ifdef HAS_X86
    ENTRY(avx512, runs_avx512),
    ENTRY(avx2, runs_avx2),
#endif
#ifdef HAS_NEON
    ENTRY(neon, always),
#endif
    ENTRY(portable, always),
};
#define NUMBER_OF_LEVELS (sizeof LEVELS / sizeof LEVELS[0])
