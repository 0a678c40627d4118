/* Dot products of a few rows and columns, float32 or bfloat16 summed in float32.
 *
 * Lane l of a vector sums inputs l, l + VW, l + 2 VW ... in ascending order, then the lanes are
 * folded in halves: a product has the same bits whatever block it is in. */
#ifndef ROLLOUT_DOTS_H
#define ROLLOUT_DOTS_H
#include "vec.h"

#define BLOCK 4 /* rows and columns, at most */

INLINE const void *from(const void *p, int64_t i, int bf16) {
    return (const char *)p + i * (bf16 ? 2 : 4);
}

/* Rows by columns over `length` inputs from `first` on; sums: [rows, BLOCK]. */
INLINE void sum_segment(int rows, int columns, const void *const *x, const void *const *w,
                        int64_t first, int64_t length, float *sums, int bf16) {
    vf sum[BLOCK][BLOCK];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) sum[r][c] = splat(0);
    int64_t whole = first + length / VW * VW, end = first + length;
    for (int64_t k = first; k < whole; k += VW) {
        vf weights[BLOCK];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) weights[c] = load(w[c], k, bf16);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vf v = load(x[r], k, bf16);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) sum[r][c] = fused(v, weights[c], sum[r][c]);
        }
    }
    if (whole < end) {
        int rest = (int)(end - whole);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                sum[r][c] = fused(load_n(x[r], whole, rest, bf16),
                                  load_n(w[c], whole, rest, bf16), sum[r][c]);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sums[r * BLOCK + c] = reduce_sum(sum[r][c]);
}
#endif
