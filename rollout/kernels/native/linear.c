/* y = x W^T + bias, where W [outputs, inputs] bfloat16 lies in tiles of 16 outputs by pairs of
 * inputs: [outputs / 16, inputs / 2, 16, 2]. That is what a dot-product instruction reads in one
 * load, and 16 such pairs are one B tile of AMX, so no copy of the weights in another order exists.
 * Gated, W is gate over up and y = silu(gate) * up, all rounded as separate ops would.
 *
 * One work item is two pairs of tiles (neighbours; or a gate and what it scales) and a stretch of
 * rows. Every output sums its inputs in one fixed order that depends on the machine alone: a row
 * has the same bits in any batch, on any number of threads. A few rows are bound by reading W once;
 * of many, a stretch of x stays in L2 while W passes.
 *
 * Segments are equal stretches of the inputs, each summed by itself; their sums are added in a
 * binary tree. Ranks that hold neighbouring ones have its branches, as `wide` sums in float32. */
#include "linear_amx.h"
#include "linear_float8.h"
#include "linear_vectors.h"

/* 2: AMX; 1: bfloat16 dot products of AVX-512; 0: plain vectors. */
EXPORT int32_t rollout_linear_level(void) {
    if (amx_allowed()) return 2;
#if DOTS
    return 1;
#else
    return 0;
#endif
}

/* float32 lanes of a vector: 16 AVX-512, 8 AVX2, 4 what every machine has. */
EXPORT int32_t rollout_vector_width(void) { return VW; }

static Linear prepared(const uint16_t *x, int64_t x_row, const uint16_t *w, const uint16_t *bias,
                       void *out, int64_t rows, int64_t outputs, int64_t inputs, int32_t gated,
                       int32_t segments, int32_t wide, int32_t level) {
    int64_t tile = inputs * TILE, tiles = outputs / TILE, pairs = (tiles + 1) / 2;
    Linear p = {.x = x, .w = w, .bias = bias, .out = out, .x_row = x_row, .rows = rows};
    p.outputs = outputs, p.inputs = inputs, p.pairs = pairs, p.odd = tiles % 2, p.gated = gated;
    p.segments = segments, p.length = inputs / segments, p.wide = wide;
    p.within = gated ? pairs * tile : tile, p.between = gated ? tile : 2 * tile;
    int64_t fit = level ? CACHED / (inputs * 2) : CACHED_FLOATS / inputs;
    p.stretch = level ? fit / (2 * TILE) * (2 * TILE) : fit / MANY * MANY;
    if (p.stretch < 2 * TILE) p.stretch = 2 * TILE;
    p.groups = (pairs + GROUP - 1) / GROUP;
    p.items = (rows + p.stretch - 1) / p.stretch * p.groups;
    return p;
}

static void share_out(Team *t, const Linear *p, int32_t level, int32_t threads) {
    Widened own = {.row = -1}; /* each thread widens the rows it multiplies */
    for (int64_t i; (i = claim(t)) < p->items;) {
        /* What this thread will claim next, as long as all take about as long. */
        int64_t next = i + threads < p->items ? i + threads : i;
        int64_t after = next % p->groups * GROUP;
        int64_t row = i / p->groups * p->stretch, pair = i % p->groups * GROUP;
        int64_t stop = row + p->stretch < p->rows ? row + p->stretch : p->rows;
        int count = (int)(p->pairs - pair < GROUP ? p->pairs - pair : GROUP);
        if (!level && own.row != row) widen_rows(p, row, stop, &own);
        if (!level) float_item(p, &own, pair, count);
        else if (level > 1) amx_item(p, row, stop, pair, count);
        else dot_item(p, row, stop, pair, count, after);
    }
}

/* outputs: a multiple of 16 (of 32 where gated); inputs: even, in each of the `segments` (1, 2 or 4)
 * too; out: float32 where `wide`, which is not gated; `level` at most that of
 * rollout_linear_level. */
void linear_part(Team *t, const uint16_t *x, int64_t x_row, const uint16_t *w, const uint16_t *bias,
                 void *out, int64_t rows, int64_t outputs, int64_t inputs, int32_t gated,
                 int32_t segments, int32_t wide, int32_t level, int32_t threads) {
    Linear p = prepared(x, x_row, w, bias, out, rows, outputs, inputs, gated, segments, wide, level);
    share_out(t, &p, level, threads);
}

EXPORT void rollout_linear(const uint16_t *x, int64_t x_row, const uint16_t *w,
                           const uint16_t *bias, void *out, int64_t rows, int64_t outputs,
                           int64_t inputs, int32_t gated, int32_t segments, int32_t wide,
                           int32_t level, int32_t threads) {
    Linear p = prepared(x, x_row, w, bias, out, rows, outputs, inputs, gated, segments, wide, level);
    Team team = {0};
    if (p.items < 2 || rows * outputs * inputs < 65536) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    share_out(&team, &p, level, threads);
}

/* The same of codes; outputs, gated, wide, level: as there. inputs: a multiple of four, and `cell`,
 * which has one scale of each output, too (or is `inputs`). */
EXPORT void rollout_float8_linear(const uint16_t *x, int64_t x_row, const uint8_t *codes,
                                  const float *scales, const uint16_t *bias, void *out,
                                  int64_t rows, int64_t outputs, int64_t inputs, int64_t cell,
                                  int32_t gated, int32_t wide, int32_t level, int32_t threads) {
    Linear p = prepared(x, x_row, 0, bias, out, rows, outputs, inputs, gated, 1, wide, level);
    Coded c = {codes, scales, cell, (inputs + cell - 1) / cell};
    Team team = {0};
    p.items = p.items / p.groups * p.pairs;
    if (p.items < 2 || rows * outputs * inputs < 65536) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    share_out_coded(&team, &p, &c, level);
}
