/* y += scale (x A^T) B for rows of several adapters, float32 or bfloat16 summed in float32.
 *
 * Rows of one adapter lie in tiles. First every product with A, [rows, parts, rank], then what B
 * makes of it, a stretch of outputs at a time, so that a stretch of B is read once a tile. Sums have
 * one order (dots.h) whatever tile a row is in, so a row has the same bits in any batch. */
#include "dots.h"

#define STRETCH 256     /* outputs of a work item */
#define SMALL (1 << 16) /* multiplications below which threads cost more than they save */

typedef struct {
    const void *a, *b, *x;
    void *y;
    const float *scales;
    const int64_t *bounds;
    const int32_t *rows, *tiles;
    float *work;
    int64_t y_row, x_row, parts, rank, inputs, outputs;
} Lora;

/* Rows `first` .. first + count of `rows` by ranks r .. r + ranks of one part. */
INLINE void down_block(const Lora *p, const void *a, int64_t first, int count, int64_t part,
                       int64_t r, int ranks, float scale, int bf16) {
    float sums[BLOCK * BLOCK];
    const void *x[BLOCK], *w[BLOCK];
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) x[i] = from(p->x, p->rows[first + i] * p->x_row, bf16);
#pragma GCC unroll 4
    for (int c = 0; c < ranks; c++) w[c] = from(a, (r + c) * p->inputs, bf16);
    sum_segment(count, ranks, x, w, 0, p->inputs, sums, bf16);
    for (int i = 0; i < count; i++)
        for (int c = 0; c < ranks; c++)
            p->work[((first + i) * p->parts + part) * p->rank + r + c] =
                sums[i * BLOCK + c] * scale;
}

INLINE void down_rows(const Lora *p, const void *a, int64_t first, int64_t stop, int64_t part,
                      int64_t r, int ranks, float scale, int bf16) {
    for (; first + BLOCK <= stop; first += BLOCK)
        down_block(p, a, first, BLOCK, part, r, ranks, scale, bf16);
    switch (stop - first) {
    case 1: down_block(p, a, first, 1, part, r, ranks, scale, bf16); break;
    case 2: down_block(p, a, first, 2, part, r, ranks, scale, bf16); break;
    case 3: down_block(p, a, first, 3, part, r, ranks, scale, bf16); break;
    default: break;
    }
}

INLINE void down(const Lora *p, const int32_t *tile, int64_t part, int bf16) {
    int64_t at = tile[0] * p->parts + part, r = 0;
    float scale = p->scales[at];
    const void *a = from(p->a, at * p->rank * p->inputs, bf16);
    if (scale == 0) return;
    for (; r + BLOCK <= p->rank; r += BLOCK)
        down_rows(p, a, tile[1], tile[2], part, r, BLOCK, scale, bf16);
    for (; r < p->rank; r++) down_rows(p, a, tile[1], tile[2], part, r, 1, scale, bf16);
}

/* Outputs o .. o + VW (of which only those below `end` exist) of some rows. */
INLINE void up_block(const Lora *p, const void *b, int64_t first, int count, int64_t part,
                     int64_t o, int64_t end, int bf16) {
    vf sum[BLOCK];
    const float *h[BLOCK];
    void *y[BLOCK];
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
        y[i] = (void *)from(p->y, p->rows[first + i] * p->y_row, bf16);
        h[i] = p->work + ((first + i) * p->parts + part) * p->rank;
        sum[i] = load_at(y[i], o, end, bf16);
    }
    for (int64_t r = 0; r < p->rank; r++) {
        vf weights = load_at(from(b, r * p->outputs, bf16), o, end, bf16);
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) sum[i] = fused(weights, repeat(h[i] + r), sum[i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) store_at(y[i], o, end, sum[i], bf16);
}

INLINE void up(const Lora *p, const int32_t *tile, int64_t part, int64_t o, int64_t end,
               int bf16) {
    const void *b = from(p->b, tile[0] * p->rank * p->outputs, bf16);
    if (p->scales[tile[0] * p->parts + part] == 0) return;
    for (; o < end; o += VW) {
        int64_t first = tile[1], stop = tile[2];
        for (; first + BLOCK <= stop; first += BLOCK)
            up_block(p, b, first, BLOCK, part, o, end, bf16);
        for (; first < stop; first++) up_block(p, b, first, 1, part, o, end, bf16);
    }
}

static void down_f32(const Lora *p, const int32_t *tile, int64_t part) { down(p, tile, part, 0); }
static void down_bf16(const Lora *p, const int32_t *tile, int64_t part) { down(p, tile, part, 1); }
static void up_f32(const Lora *p, const int32_t *tile, int64_t part, int64_t o, int64_t end) {
    up(p, tile, part, o, end, 0);
}
static void up_bf16(const Lora *p, const int32_t *tile, int64_t part, int64_t o, int64_t end) {
    up(p, tile, part, o, end, 1);
}

/* The stretch number `i` of the outputs, counted over parts. */
static void stretch(const Lora *p, const int32_t *tile, int64_t i, int bf16) {
    for (int64_t part = 0; part < p->parts; part++) {
        int64_t o = p->bounds[part] + i * STRETCH, end = p->bounds[part + 1];
        if (o < end) {
            (bf16 ? up_bf16 : up_f32)(p, tile, part, o, o + STRETCH < end ? o + STRETCH : end);
            return;
        }
        i -= (end - p->bounds[part] + STRETCH - 1) / STRETCH;
    }
}

EXPORT void rollout_lora_linear(void *y, const void *x, const void *a, const void *b,
                                const void *scales, const void *bounds, const void *rows,
                                const void *tiles, void *work, int64_t y_row, int64_t x_row,
                                int64_t num_tiles, int64_t num_rows, int64_t parts, int64_t rank,
                                int64_t inputs, int64_t outputs, int32_t bf16, int32_t threads) {
    Lora p = {.a = a, .b = b, .x = x, .y = y, .scales = scales, .bounds = bounds, .rows = rows};
    p.tiles = tiles, p.work = work, p.y_row = y_row, p.x_row = x_row, p.parts = parts;
    p.rank = rank, p.inputs = inputs, p.outputs = outputs;
    int64_t stretches = 0;
    for (int64_t part = 0; part < parts; part++)
        stretches += (p.bounds[part + 1] - p.bounds[part] + STRETCH - 1) / STRETCH;
    if (num_rows * rank * (parts * inputs + outputs) < SMALL) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_tiles * parts; i++)
            (bf16 ? down_bf16 : down_f32)(&p, p.tiles + i / parts * 3, i % parts);
#pragma omp for schedule(dynamic, 4)
        for (int64_t i = 0; i < num_tiles * stretches; i++)
            stretch(&p, p.tiles + i / stretches * 3, i % stretches, bf16);
    }
}
