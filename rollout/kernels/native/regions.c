/* Many copies in one call; see rollout/kernels/copy_regions. */
#include "round.h"
#include "turn.h"

#define BLOCK 256   /* columns of all lines at a time, where lines are read across */
#define ROUNDED 0x102 /* kind of a copy from float32 to bfloat16; others are an element's bytes */

/* Lines of columns; strides in elements. */
typedef struct {
    const uint8_t *from;
    uint8_t *to;
    int64_t lines, columns, from_line, from_column, to_line, to_column;
} Copy;

#define COPY(type)                                                                                \
    for (int64_t i = 0; i < n; i++)                                                               \
        ((type *)to)[i * to_stride] = ((const type *)from)[i * from_stride];                      \
    break

INLINE void copy_line(uint8_t *to, int64_t to_stride, const uint8_t *from, int64_t from_stride,
                      int64_t n, int kind) {
    switch (kind) {
    case 1: COPY(uint8_t);
    case 2: COPY(uint16_t);
    case 4: COPY(uint32_t);
    case 8: COPY(uint64_t);
    default: round_all((uint16_t *)to, to_stride, (const uint32_t *)from, from_stride, n);
    }
}

#if VW == 16
/* As `rounded_half` of each lane. */
INLINE __m256i rounded_halves(__m512i u) {
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmpgt_epi32_mask(_mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff)),
                                            _mm512_set1_epi32(0x7f800000));
    up = _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), nan, _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(up);
}

/* What lies by columns and is to lie by lines, in squares; how many columns of all lines it did. */
static int64_t turned(const Copy *c, int kind) {
    int64_t columns = c->columns / SIDE * SIDE, lines = c->lines;
    if (c->from_line != 1 || c->to_column != 1 || lines % SIDE) return 0;
    if (kind != ROUNDED && kind != 2) return 0;
    for (int64_t l = 0; l < lines; l += SIDE)
        for (int64_t k = 0; k < columns; k += SIDE) {
            int64_t at = l + k * c->from_column;
            __m512i words[SIDE];
            for (int i = 0; i < SIDE; i++, at += c->from_column)
                words[i] = kind == 2 ? _mm512_cvtepu16_epi32(_mm256_loadu_si256(
                                           (const __m256i *)((const uint16_t *)c->from + at)))
                                     : _mm512_loadu_si512((const uint32_t *)c->from + at);
            turn_words(words);
            uint16_t *to = (uint16_t *)c->to + l * c->to_line + k;
            for (int i = 0; i < SIDE; i++)
                _mm256_storeu_si256((__m256i *)(to + i * c->to_line),
                                    kind == 2 ? _mm512_cvtepi32_epi16(words[i])
                                              : rounded_halves(words[i]));
        }
    return columns;
}
#else
static int64_t turned(const Copy *c, int kind) { return (void)c, (void)kind, 0; }
#endif

static void copy(const Copy *c, int kind) {
    int64_t size = kind == ROUNDED ? 2 : kind, read = kind == ROUNDED ? 4 : kind;
    int dense = c->from_column == 1 && c->to_column == 1;
    int64_t step = dense ? c->columns : BLOCK;
    for (int64_t first = turned(c, kind); first < c->columns; first += step) {
        int64_t n = c->columns - first < step ? c->columns - first : step;
        for (int64_t l = 0; l < c->lines; l++) {
            const uint8_t *from = c->from + (l * c->from_line + first * c->from_column) * read;
            uint8_t *to = c->to + (l * c->to_line + first * c->to_column) * size;
            if (dense && kind != ROUNDED) memcpy(to, from, (size_t)(n * size));
            else copy_line(to, c->to_column, from, c->from_column, n, kind);
        }
    }
}

EXPORT void rollout_copy_regions(const void *copies, int64_t number, int32_t kind,
                                 int32_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 4)
    for (int64_t i = 0; i < number; i++) copy((const Copy *)copies + i, kind);
}
