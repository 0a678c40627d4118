/* Codes of float8 (e4m3) and of four bits (e2m1, the low half of a byte first) as bfloat16, times
 * the scale of their cell: the product in float32, rounded once. */
#include "float8.h"

typedef uint8_t vb __attribute__((vector_size(VW)));

/* What four bits stand for: halves of 0 1 2 3 4 6 8 12, by two bits of exponent and one more. */
INLINE vf from_e2m1(vi code) {
    vi size = code & 7, sign = (code & 8) << 28;
    vf v = (vf)((size << 22) + (126 << 23));
    v = blend(size < 2, __builtin_convertvector(size, vf) * 0.5f, v);
    return (vf)((vi)v | sign);
}

/* VW codes of four bits. */
INLINE vi halves_at(const uint8_t *bytes) {
    uint32_t words[(VW + 7) / 8] = {0};
    memcpy(words, bytes, VW / 2);
    vu all = words[0] - (vu){0};
#if VW == 16
    all = (vu)blend(LANES < 8, (vf)all, (vf)(words[1] - (vu){0}));
#endif
    return (vi)(all >> (vu)(LANES % 8 * 4)) & 15;
}

INLINE vi codes_at(const uint8_t *row, int64_t at, int64_t columns, int32_t halves) {
    int64_t n = columns - at < VW ? columns - at : VW;
    if (n == VW) {
        if (halves) return halves_at(row + at / 2);
        vb bytes;
        memcpy(&bytes, row + at, sizeof bytes);
        return __builtin_convertvector(bytes, vi);
    }
    vi code = {0};
    for (int64_t j = 0; j < n; j++)
        code[j] = halves ? row[(at + j) / 2] >> 4 * ((at + j) % 2) & 15 : row[at + j];
    return code;
}

static float power_of_two(int32_t byte) {
    return byte == 255 ? NAN : ldexpf(1.0f, byte - 127);
}

/* codes: [rows, columns] (half of it where `halves`); scales: [rows, cells] of `cell` columns each,
 * float32, or where `halves` exponents in a byte; null: 1. `cell`: a multiple of 32, or columns. */
EXPORT void rollout_dequantize(const uint8_t *codes, const void *scales, uint16_t *out,
                               int64_t rows, int64_t columns, int64_t cell, int32_t halves,
                               int32_t threads) {
    int64_t cells = (columns + cell - 1) / cell, width = halves ? columns / 2 : columns;
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * columns > 65536)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cells; c++) {
            float scale = 1.0f;
            if (scales && halves) scale = power_of_two(((const uint8_t *)scales)[r * cells + c]);
            else if (scales) scale = ((const float *)scales)[r * cells + c];
            int64_t stop = (c + 1) * cell < columns ? (c + 1) * cell : columns;
            for (int64_t i = c * cell; i < stop; i += VW) {
                vi code = codes_at(codes + r * width, i, stop, halves);
                vf v = halves ? from_e2m1(code) : from_e4m3(code);
                store_at(out + r * columns, i, stop, v * scale, 1);
            }
        }
}
