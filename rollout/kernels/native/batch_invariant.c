/* y = x W^T + bias, W [outputs, inputs] row by row, float32 or bfloat16 summed in float32.
 *
 * A segment is summed as dots.h says, and the segments' sums are added in a binary tree, whatever
 * block, batch or thread an output is in, so a row has the same bits in any batch.
 * Ranks that hold neighbouring segments have branches of the tree, as `wide` sums in float32. */
#include "dots.h"

#if VW == 16
#define ROW_BLOCK BLOCK
#else
#define ROW_BLOCK 2 /* 16 registers: 8 sums */
#endif
#define SEGMENTS 4         /* at most */
#define ITEM 64            /* outputs of a work item */
#define CACHED (1 << 19)   /* bytes of x in a work item */

typedef struct {
    const void *x, *w, *bias; /* bias may be null */
    void *out;
    int64_t x_row, rows, outputs, inputs, length; /* length: inputs of a segment */
    int32_t segments;
    int32_t wide; /* 1: float32 sums are stored as they are, without the bias; 2: each segment's */
} Ordered;

/* One element of the result, of which `sum` is whole. */
INLINE void finish(const void *bias, int64_t column, float sum, void *out, int64_t at, int bf16) {
    vf y = splat(sum);
    if (bias) y += load_n(bias, column, 1, bf16);
    store_n(out, at, y, 1, bf16);
}

INLINE void block(const Ordered *p, int rows, int columns, int64_t row, int64_t column, int bf16) {
    float sums[SEGMENTS][ROW_BLOCK * BLOCK];
    const void *x[ROW_BLOCK], *w[BLOCK];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) x[r] = from(p->x, (row + r) * p->x_row, bf16);
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) w[c] = from(p->w, (column + c) * p->inputs, bf16);
    for (int s = 0; s < p->segments; s++)
        sum_segment(rows, columns, x, w, s * p->length, p->length, sums[s], bf16);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            int i = r * BLOCK + c;
            int64_t at = (row + r) * p->outputs + column + c;
            if (p->wide == 2) {
                for (int s = 0; s < p->segments; s++)
                    ((float *)p->out)[s * p->rows * p->outputs + at] = sums[s][i];
                continue;
            }
            for (int step = 1; step < p->segments; step *= 2)
                for (int s = 0; s < p->segments; s += 2 * step) sums[s][i] += sums[s + step][i];
            if (p->wide) ((float *)p->out)[at] = sums[0][i];
            else finish(p->bias, column + c, sums[0][i], p->out, at, bf16);
        }
}

INLINE void rows_by(const Ordered *p, int columns, int64_t row, int64_t stop, int64_t column,
                    int bf16) {
    for (; row + ROW_BLOCK <= stop; row += ROW_BLOCK)
        block(p, ROW_BLOCK, columns, row, column, bf16);
    switch (stop - row) {
    case 1: block(p, 1, columns, row, column, bf16); break;
#if ROW_BLOCK == 4
    case 2: block(p, 2, columns, row, column, bf16); break;
    case 3: block(p, 3, columns, row, column, bf16); break;
#endif
    default: break;
    }
}

INLINE void item(const Ordered *p, int64_t row, int64_t stop, int64_t column, int64_t end,
                 int bf16) {
    for (; column + BLOCK <= end; column += BLOCK) rows_by(p, BLOCK, row, stop, column, bf16);
    for (; column < end; column++) rows_by(p, 1, row, stop, column, bf16);
}

static void item_f32(const Ordered *p, int64_t row, int64_t stop, int64_t column, int64_t end) {
    item(p, row, stop, column, end, 0);
}
static void item_bf16(const Ordered *p, int64_t row, int64_t stop, int64_t column, int64_t end) {
    item(p, row, stop, column, end, 1);
}

/* segments: 1, 2 or 4, which divide the inputs; out: float32 where `wide`, of 2 for each segment. */
EXPORT void rollout_batch_invariant_linear(const void *x, int64_t x_row, const void *w, const void *bias,
                                   void *out, int64_t rows, int64_t outputs, int64_t inputs,
                                   int32_t segments, int32_t wide, int32_t bf16, int32_t threads) {
    Ordered p = {.x = x, .w = w, .bias = bias, .out = out, .x_row = x_row};
    p.rows = rows, p.outputs = outputs, p.inputs = inputs, p.length = inputs / segments;
    p.segments = segments, p.wide = wide;
    int64_t stretch = CACHED / (inputs * (bf16 ? 2 : 4) + 1) / ROW_BLOCK * ROW_BLOCK;
    if (stretch < ROW_BLOCK) stretch = ROW_BLOCK;
    int64_t groups = (outputs + ITEM - 1) / ITEM, items = (rows + stretch - 1) / stretch * groups;
    if (items < 2 || rows * outputs * inputs < 65536) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
    for (int64_t i = 0; i < items; i++) {
        int64_t row = i / groups * stretch, column = i % groups * ITEM;
        int64_t stop = row + stretch < rows ? row + stretch : rows;
        int64_t end = column + ITEM < outputs ? column + ITEM : outputs;
        (bf16 ? item_bf16 : item_f32)(&p, row, stop, column, end);
    }
}

/* What the kernels make of whole sums [rows, columns], float32: the bias added, rounded. */
EXPORT void rollout_finish_sums(const float *sums, const void *bias, void *out, int64_t rows,
                                int64_t columns, int32_t bf16) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += VW) {
            vf y = load_at(sums + r * columns, c, columns, 0);
            if (bias) y += load_at(bias, c, columns, bf16);
            if (bf16) store_at((uint16_t *)out + r * columns, c, columns, y, 1);
            else store_at((float *)out + r * columns, c, columns, y, 0);
        }
}
