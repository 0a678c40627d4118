/* y = x W^T + bias, W [outputs, inputs] row by row, float32 or bfloat16 summed in float32.
 *
 * Lane l of a vector sums inputs l, l + VW, l + 2 VW ... in ascending order, then the lanes are
 * folded in halves: an output is summed in this order whatever block, batch or thread it is in, so
 * a row has the same bits in any batch. */
#include "vec.h"

#if VW == 16
#define ROW_BLOCK 4
#else
#define ROW_BLOCK 2 /* 16 registers: 8 sums */
#endif
#define COLUMN_BLOCK 4
#define ITEM 64            /* outputs of a work item */
#define CACHED (1 << 19)   /* bytes of x in a work item */

typedef struct {
    const void *x, *w, *bias; /* bias may be null */
    void *out;
    int64_t x_row, outputs, inputs;
} Ordered;

INLINE const void *from(const void *p, int64_t i, int bf16) {
    return (const char *)p + i * (bf16 ? 2 : 4);
}

INLINE void block(const Ordered *p, int rows, int columns, int64_t row, int64_t column, int bf16) {
    vf sum[ROW_BLOCK][COLUMN_BLOCK];
    const void *x[ROW_BLOCK], *w[COLUMN_BLOCK];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) x[r] = from(p->x, (row + r) * p->x_row, bf16);
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) w[c] = from(p->w, (column + c) * p->inputs, bf16);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) sum[r][c] = splat(0);
    int64_t whole = p->inputs / VW * VW;
    for (int64_t k = 0; k < whole; k += VW) {
        vf weights[COLUMN_BLOCK];
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) weights[c] = load(w[c], k, bf16);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vf v = load(x[r], k, bf16);
#pragma GCC unroll 4
            for (int c = 0; c < columns; c++) sum[r][c] = fused(v, weights[c], sum[r][c]);
        }
    }
    if (whole < p->inputs) {
        int rest = (int)(p->inputs - whole);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                sum[r][c] = fused(load_n(x[r], whole, rest, bf16),
                                  load_n(w[c], whole, rest, bf16), sum[r][c]);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            vf y = splat(reduce_sum(sum[r][c]));
            if (p->bias) y += load_n(p->bias, column + c, 1, bf16);
            store_n(p->out, (row + r) * p->outputs + column + c, y, 1, bf16);
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
    for (; column + COLUMN_BLOCK <= end; column += COLUMN_BLOCK)
        rows_by(p, COLUMN_BLOCK, row, stop, column, bf16);
    for (; column < end; column++) rows_by(p, 1, row, stop, column, bf16);
}

static void item_f32(const Ordered *p, int64_t row, int64_t stop, int64_t column, int64_t end) {
    item(p, row, stop, column, end, 0);
}
static void item_bf16(const Ordered *p, int64_t row, int64_t stop, int64_t column, int64_t end) {
    item(p, row, stop, column, end, 1);
}

EXPORT void rollout_batch_invariant_linear(const void *x, int64_t x_row, const void *w, const void *bias,
                                   void *out, int64_t rows, int64_t outputs, int64_t inputs,
                                   int32_t bf16, int32_t threads) {
    Ordered p = {.x = x, .w = w, .bias = bias, .out = out, .x_row = x_row};
    p.outputs = outputs, p.inputs = inputs;
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
