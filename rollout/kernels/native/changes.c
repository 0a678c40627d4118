/* Deltas: which elements changed, their positions as gaps and back, and where they go.
 * See rollout/kernels/diff_update, gap_codes and scatter_indices. */
#include <stdint.h>
#include <string.h>
#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define LINE 64 /* bytes compared before any element is looked at */

/* ---- diff_update ---- */

typedef struct {
    int64_t count, most;
    int64_t *positions;
    uint8_t *values;
} Changes;

/* Element i of `size` bytes differs: note it and bring the copy up; 0 when there is no room. */
static inline int take(Changes *found, uint8_t *copy, const uint8_t *new, int64_t i, size_t size) {
    if (found->count == found->most)
        return 0;
    found->positions[found->count] = i;
    memcpy(found->values + found->count++ * size, new + i * size, size);
    memcpy(copy + i * size, new + i * size, size);
    return 1;
}

static inline int take_each(Changes *found, uint8_t *copy, const uint8_t *new, int64_t i,
                            int64_t stop, size_t size) {
    for (; i < stop; i++)
        if (memcmp(copy + i * size, new + i * size, size) && !take(found, copy, new, i, size))
            return 0;
    return 1;
}

#if defined(__AVX512BW__)
/* A bit per element of a line that differs. */
static inline uint64_t differing(const uint8_t *a, const uint8_t *b, size_t size) {
    __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    switch (size) {
    case 1: return _mm512_cmpneq_epi8_mask(x, y);
    case 2: return _mm512_cmpneq_epi16_mask(x, y);
    case 4: return _mm512_cmpneq_epi32_mask(x, y);
    default: return _mm512_cmpneq_epi64_mask(x, y);
    }
}

static inline int take_line(Changes *found, uint8_t *copy, const uint8_t *new, int64_t first,
                            size_t size) {
    uint64_t bits = differing(copy + first * size, new + first * size, size);
    for (; bits; bits &= bits - 1)
        if (!take(found, copy, new, first + __builtin_ctzll(bits), size))
            return 0;
    return 1;
}
#else
static inline int same_line(const uint8_t *a, const uint8_t *b) {
    uint64_t differs = 0, x, y;
    for (int i = 0; i < LINE; i += 8) {
        memcpy(&x, a + i, sizeof x);
        memcpy(&y, b + i, sizeof y);
        differs |= x ^ y;
    }
    return !differs;
}

static inline int take_line(Changes *found, uint8_t *copy, const uint8_t *new, int64_t first,
                            size_t size) {
    return same_line(copy + first * size, new + first * size) ||
           take_each(found, copy, new, first, first + LINE / size, size);
}
#endif

static inline __attribute__((always_inline)) int64_t take_all(Changes *found, uint8_t *copy,
                                                              const uint8_t *new, int64_t n,
                                                              size_t size) {
    int64_t first = 0, per_line = LINE / size;
    for (; first + per_line <= n; first += per_line)
        if (!take_line(found, copy, new, first, size))
            return -1;
    return take_each(found, copy, new, first, n, size) ? found->count : -1;
}

/* Returns how many differed, or -1 when more than `most` do: then a part has been taken. */
EXPORT int64_t rollout_diff_update(uint8_t *copy, const uint8_t *new, int64_t n, int32_t size,
                                    int64_t most, int64_t *positions, uint8_t *values) {
    Changes found = {0, most, positions, values};
    switch (size) {
    case 1: return take_all(&found, copy, new, n, 1);
    case 2: return take_all(&found, copy, new, n, 2);
    case 4: return take_all(&found, copy, new, n, 4);
    default: return take_all(&found, copy, new, n, 8);
    }
}

/* ---- gap codes ---- */

/* Bytes that the codes take in widths of 1, 2 and 4. */
EXPORT void rollout_gap_lengths(const int64_t *positions, int64_t n, int64_t *lengths) {
    int64_t codes[3] = {n, n, n}, last = -1;
    for (int64_t i = 0; i < n; i++) {
        uint64_t gap = positions[i] - last - 1;
        last = positions[i];
        if (gap < 255)
            continue;
        codes[0] += gap / 255;
        codes[1] += gap / 65535;
        codes[2] += gap / 4294967295u;
    }
    for (int w = 0; w < 3; w++)
        lengths[w] = codes[w] << w;
}

#define ENCODE(T)                                                                                  \
    for (int64_t i = 0; i < n; i++) {                                                              \
        uint64_t gap = positions[i] - last - 1;                                                    \
        last = positions[i];                                                                       \
        T code;                                                                                    \
        for (; gap >= (T)-1; gap -= (T)-1, out += sizeof code)                                     \
            memset(out, 0xff, sizeof code);                                                        \
        code = (T)gap;                                                                             \
        memcpy(out, &code, sizeof code);                                                           \
        out += sizeof code;                                                                        \
    }

EXPORT void rollout_encode_gaps(const int64_t *positions, int64_t n, int32_t width, uint8_t *out) {
    int64_t last = -1;
    switch (width) {
    case 1: ENCODE(uint8_t) break;
    case 2: ENCODE(uint16_t) break;
    default: ENCODE(uint32_t) break;
    }
}

/* The codes may be anything: nothing is written beyond `count`, and `at` cannot overflow, as it
 * stays below `numel` (at most 2^62) plus one code. */
#define DECODE(T)                                                                                  \
    for (int64_t i = 0; i < n; i++) {                                                              \
        T code;                                                                                    \
        memcpy(&code, codes + i * sizeof code, sizeof code);                                       \
        at += code;                                                                                \
        if (at > numel)                                                                            \
            return 0;                                                                              \
        open = code == (T)-1;                                                                      \
        if (open)                                                                                  \
            continue;                                                                              \
        if (found == count || at == numel)                                                         \
            return 0;                                                                              \
        positions[found++] = at++;                                                                 \
    }

/* 1, or 0 unless these are exactly `count` positions below `numel`. */
EXPORT int32_t rollout_decode_gaps(const uint8_t *codes, int64_t n, int32_t width, int64_t count,
                                   int64_t numel, int64_t *positions) {
    int64_t at = 0, found = 0;
    int open = 0;
    switch (width) {
    case 1: DECODE(uint8_t) break;
    case 2: DECODE(uint16_t) break;
    default: DECODE(uint32_t) break;
    }
    return !open && found == count;
}

/* ---- scatter_indices ---- */

/* Of ascending `positions` in a matrix of `columns`, those in rows row .. end_row and columns
 * column .. end_column: their indices, and where they lie in a matrix of `width` columns at
 * (put_row, put_column), row-major or (tile_rows > 0) in tiles [rows, pairs, tile_rows, 2]. */
EXPORT int64_t rollout_scatter_indices(const int64_t *positions, int64_t n, int64_t columns,
                                    int64_t row, int64_t end_row, int64_t column,
                                    int64_t end_column, int64_t put_row, int64_t put_column,
                                    int64_t width, int64_t tile_rows, int64_t *kept,
                                    int64_t *places) {
    int64_t count = 0, first = 0, next = 0, base = 0;
    int inside = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t position = positions[i];
        if (position >= next) {
            int64_t r = position / columns;
            first = r * columns, next = first + columns;
            inside = row <= r && r < end_row;
            r += put_row - row;
            base = tile_rows ? r / tile_rows * tile_rows * width + r % tile_rows * 2 : r * width;
        }
        int64_t c = position - first;
        if (!inside || c < column || c >= end_column)
            continue;
        c += put_column - column;
        kept[count] = i;
        places[count++] = base + (tile_rows ? (c & ~(int64_t)1) * tile_rows + (c & 1) : c);
    }
    return count;
}
