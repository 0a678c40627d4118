/* The digest of rollout/kernels/digest: sum of mixed (position, bits). */
#include "round.h"

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#if defined(__AVX512F__)
#define LANES 8
#include <immintrin.h>
#elif defined(__AVX2__)
#define LANES 4
#include <immintrin.h>
#else
#define LANES 2
#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#endif
#define CHUNK (1 << 15)
#define STEP 0x9E3779B97F4A7C15ull

typedef uint64_t v64 __attribute__((vector_size(8 * LANES)));
typedef uint8_t v8x8 __attribute__((vector_size(LANES)));
typedef uint16_t v8x16 __attribute__((vector_size(2 * LANES)));
typedef uint32_t v8x32 __attribute__((vector_size(4 * LANES)));

INLINE uint64_t fold(uint64_t x) { return (x & 0xFFFFFFFFu) * (x >> 32) + x; }
INLINE uint64_t mix(uint64_t x) { return fold(fold(x)); }
#if defined(__AVX512F__)
INLINE v64 low_by_high(v64 x) { return (v64)_mm512_mul_epu32((__m512i)x, (__m512i)(x >> 32)); }
#elif defined(__AVX2__)
INLINE v64 low_by_high(v64 x) { return (v64)_mm256_mul_epu32((__m256i)x, (__m256i)(x >> 32)); }
#elif defined(__SSE2__)
INLINE v64 low_by_high(v64 x) { return (v64)_mm_mul_epu32((__m128i)x, (__m128i)(x >> 32)); }
#elif defined(__aarch64__)
INLINE v64 low_by_high(v64 x) {
    return (v64)vmull_u32(vmovn_u64((uint64x2_t)x), vshrn_n_u64((uint64x2_t)x, 32));
}
#else
INLINE v64 low_by_high(v64 x) { return (x & 0xFFFFFFFFu) * (x >> 32); }
#endif
INLINE v64 fold_lanes(v64 x) { return low_by_high(x) + x; }
INLINE v64 mix_lanes(v64 x) { return fold_lanes(fold_lanes(x)); }

INLINE uint64_t bits_at(const uint8_t *p, int size) {
    uint8_t a;
    uint16_t b;
    uint32_t c;
    uint64_t d;
    switch (size) {
    case 1: memcpy(&a, p, 1); return a;
    case 2: memcpy(&b, p, 2); return b;
    case 4: memcpy(&c, p, 4); return c;
    default: memcpy(&d, p, 8); return d;
    }
}
#if defined(__AVX512F__)
#define GROW(from, x) GROW_##from(x)
#define GROW_epu8(x) (v64) _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)&x))
#define GROW_epu16(x) (v64) _mm512_cvtepu16_epi64((__m128i)x)
#define GROW_epu32(x) (v64) _mm512_cvtepu32_epi64((__m256i)x)
#else
#define GROW(from, x) __builtin_convertvector(x, v64)
#endif
INLINE v64 lanes_at(const uint8_t *p, int size) {
    v8x8 a;
    v8x16 b;
    v8x32 c;
    v64 d;
    switch (size) {
    case 1: memcpy(&a, p, sizeof a); return GROW(epu8, a);
    case 2: memcpy(&b, p, sizeof b); return GROW(epu16, b);
    case 4: memcpy(&c, p, sizeof c); return GROW(epu32, c);
    default: memcpy(&d, p, sizeof d); return d;
    }
}

/* NaN and infinity have all bits of the exponent. While digesting, all elements of a span are OR-ed
 * together, one instruction for two vectors of them; where the outcome has all those bits (a NaN is
 * there, or large and small values are), they are counted in a pass of its own. */
typedef uint64_t raw __attribute__((vector_size(8 * LANES)));
INLINE raw raw_at(const uint8_t *p) {
    raw x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE int suspect(const raw *seen, uint64_t exponent, int size) {
    for (int64_t i = 0; i < (int64_t)sizeof *seen / size; i++)
        if ((bits_at((const uint8_t *)seen + i * size, size) & exponent) == exponent) return 1;
    return 0;
}
INLINE uint64_t nonfinite(const uint8_t *p, int64_t n, int64_t stride, uint64_t exponent, int size) {
    uint64_t count = 0;
    if (stride == 1)
        for (int64_t i = 0; i < n; i++)
            count += (bits_at(p + i * size, size) & exponent) == exponent;
    else
        for (int64_t i = 0; i < n; i++)
            count += (bits_at(p + i * stride * size, size) & exponent) == exponent;
    return count;
}

/* n positions, `step` / STEP from one to the next; elements lie `stride` elements apart. *count
 * grows by those that have all bits of `exponent`, unless that is 0. */
INLINE uint64_t span(const uint8_t *p, int64_t n, int64_t stride, uint64_t position, uint64_t step,
                     uint64_t exponent, uint64_t *count, int size) {
    uint64_t sum = 0, z = (position + 1) * STEP;
    int64_t i = 0;
    int look = exponent != 0;
    if (stride == 1 && n >= LANES) {
        enum { STEPS = 8 }; /* of LANES elements: `size` vectors of raw bytes */
        v64 at = {0}, total = {0};
        raw seen = {0};
        for (int j = 0; j < LANES; j++) at[j] = z + (uint64_t)j * step;
        for (; i + STEPS * LANES <= n; i += STEPS * LANES) {
            const uint8_t *from = p + i * size;
#pragma GCC unroll 8
            for (int j = 0; j < STEPS; j++) {
                const uint8_t *here = from + j * LANES * size;
                __builtin_prefetch(here + 2048); /* virtual machines often have no other */
                total += mix_lanes(at + lanes_at(here, size));
                at += LANES * step;
            }
#pragma GCC unroll 8
            for (int j = 0; j < size; j++) seen |= raw_at(from + j * sizeof(raw));
        }
        int64_t rest = i;
        for (; i + LANES <= n; i += LANES) {
            total += mix_lanes(at + lanes_at(p + i * size, size));
            at += LANES * step;
        }
        for (int j = 0; j < LANES; j++) sum += total[j];
        z += (uint64_t)i * step;
        if (look && rest && !suspect(&seen, exponent, size)) {
            look = 0;
            *count += nonfinite(p + rest * size, n - rest, 1, exponent, size);
        }
    }
    for (; i < n; i++, z += step) sum += mix(z + bits_at(p + i * stride * size, size));
    if (look) *count += nonfinite(p, n, stride, exponent, size);
    return sum;
}
static uint64_t span_of(const uint8_t *p, int64_t n, int64_t stride, uint64_t position,
                        uint64_t step, uint64_t exponent, uint64_t *count, int size) {
    switch (size) {
    case 1: return span(p, n, stride, position, step, exponent, count, 1);
    case 2: return span(p, n, stride, position, step, exponent, count, 2);
    case 4: return span(p, n, stride, position, step, exponent, count, 4);
    default: return span(p, n, stride, position, step, exponent, count, 8);
    }
}

/* rows x columns elements of `size` bytes; strides count elements, position_stride positions.
 * *bad: how many have all bits of `exponent`; 0 where that is 0. */
EXPORT uint64_t rollout_digest(const void *data, int32_t size, int64_t rows, int64_t columns,
                        int64_t row_stride, int64_t column_stride, uint64_t position,
                        uint64_t position_stride, int32_t threads, uint64_t exponent,
                        uint64_t *bad) {
    uint64_t count = 0;
    int64_t per_row = (columns + CHUNK - 1) / CHUNK, chunks = rows * per_row;
    if (rows * columns < CHUNK) threads = 1;
    uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static) \
    reduction(+ : sum, count)
    for (int64_t c = 0; c < chunks; c++) {
        int64_t row = c / per_row, start = c % per_row * CHUNK;
        int64_t n = columns - start < CHUNK ? columns - start : CHUNK;
        const uint8_t *p = (const uint8_t *)data + (row * row_stride + start * column_stride) * size;
        uint64_t at = position + row * position_stride + start;
        sum += span_of(p, n, column_stride, at, STEP, exponent, &count, size);
    }
    *bad = count;
    return sum;
}

/* A region: lines of columns, in elements of memory and in positions. */
typedef struct {
    const uint8_t *data;
    int64_t position, lines, columns, line, column, line_positions, column_positions;
} Region;

#define NARROWED 2048 /* elements rounded at a time */

INLINE uint64_t narrowed_span(const uint32_t *p, int64_t n, int64_t stride, uint64_t position,
                              uint64_t positions, uint64_t exponent, uint64_t *count) {
    uint16_t rounded[NARROWED];
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i += NARROWED) {
        int64_t m = n - i < NARROWED ? n - i : NARROWED;
        round_all(rounded, 1, p + i * stride, stride, m);
        sum += span((uint8_t *)rounded, m, 1, position + (uint64_t)i * positions,
                    positions * STEP, exponent, count, 2);
    }
    return sum;
}

/* Many regions of elements of `size` bytes, or of float32 digested as bfloat16 (`narrowed`). */
EXPORT void rollout_digest_regions(const void *regions, int64_t number, int32_t size,
                                   int32_t narrowed, int32_t threads, uint64_t exponent,
                                   uint64_t *sums, uint64_t *bad) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 4)
    for (int64_t i = 0; i < number; i++) {
        const Region *r = (const Region *)regions + i;
        uint64_t sum = 0, count = 0, apart = (uint64_t)r->column_positions;
        for (int64_t l = 0; l < r->lines; l++) {
            const uint8_t *p = r->data + l * r->line * (narrowed ? 4 : size);
            uint64_t at = (uint64_t)(r->position + l * r->line_positions);
            sum += narrowed ? narrowed_span((const uint32_t *)p, r->columns, r->column, at, apart,
                                            exponent, &count)
                            : span_of(p, r->columns, r->column, at, apart * STEP, exponent, &count,
                                      size);
        }
        sums[i] = sum, bad[i] = count;
    }
}

#define ROWS 16            /* of a tile, whose rows hold a pair of inputs each */
#define IN_TILE (2 * ROWS) /* elements */

INLINE uint64_t tile_span(const uint8_t *p, int64_t pairs, uint64_t position, uint64_t row_stride,
                          uint64_t exponent, uint64_t *count, int size) {
    raw seen = {0};
    v64 offset[IN_TILE / LANES], total = {0};
    for (int e = 0; e < IN_TILE; e++)
        offset[e / LANES][e % LANES] = ((uint64_t)(e / 2) * row_stride + e % 2) * STEP;
    uint64_t z = (position + 1) * STEP, sum = 0;
    for (int64_t m = 0; m < pairs; m++, z += 2 * STEP) {
        const uint8_t *from = p + m * IN_TILE * size;
        __builtin_prefetch(from + 2048);
#pragma GCC unroll 16
        for (int j = 0; j < IN_TILE / LANES; j++)
            total += mix_lanes(offset[j] + z + lanes_at(from + j * LANES * size, size));
#pragma GCC unroll 16
        for (int j = 0; j < IN_TILE * size / (int)sizeof(raw); j++)
            seen |= raw_at(from + j * sizeof(raw));
    }
    for (int j = 0; j < LANES; j++) sum += total[j];
    if (exponent && suspect(&seen, exponent, size))
        *count += nonfinite(p, pairs * IN_TILE, 1, exponent, size);
    return sum;
}

/* Tiles [tiles][pairs][16 rows][2] of elements of 2 or 4 bytes; strides as above. */
EXPORT uint64_t rollout_digest_tiles(const void *data, int32_t size, int64_t tiles, int64_t pairs,
                        int64_t tile_stride, uint64_t position, uint64_t tile_position_stride,
                        uint64_t row_position_stride, int32_t threads, uint64_t exponent,
                        uint64_t *bad) {
    uint64_t sum = 0, count = 0;
    if (tiles * pairs * IN_TILE < CHUNK) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static) \
    reduction(+ : sum, count)
    for (int64_t t = 0; t < tiles; t++) {
        const uint8_t *p = (const uint8_t *)data + t * tile_stride * size;
        uint64_t at = position + (uint64_t)t * tile_position_stride;
        sum += size == 2 ? tile_span(p, pairs, at, row_position_stride, exponent, &count, 2)
                         : tile_span(p, pairs, at, row_position_stride, exponent, &count, 4);
    }
    *bad = count;
    return sum;
}
