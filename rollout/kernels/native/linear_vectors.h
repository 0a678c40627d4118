/* Rows by tiles of linear.c with vectors: dot products of bfloat16 where AVX-512 has them, else
 * float32. */
#ifndef ROLLOUT_LINEAR_VECTORS_H
#define ROLLOUT_LINEAR_VECTORS_H

#include "area.h"
#include "linear_common.h"

/* The tiles of an item lie at `w`, the second of a missing one in place of the first: its sums are
 * not used. */
INLINE const uint16_t *tile_at(const Linear *p, int64_t pair, int tile) {
    int alone = p->odd && pair == p->pairs - 1;
    return p->w + pair * p->between + (alone ? 0 : tile * p->within);
}
INLINE int tiles_in(const Linear *p, int64_t pair) { return p->odd && pair == p->pairs - 1 ? 1 : 2; }

#define CHUNK 16 /* inputs of one row that lie together in a block */
#define AHEAD_INPUTS 32
#define CACHED_FLOATS (5 << 16) /* of a stretch of x: more than half of an L2 */

#if VW == 16
#define MANY 12 /* rows by the tiles of one pair: 24 sums of 32 registers */
#define FEW 6   /* rows by those of two */
#define PASS 2  /* tiles at a time */
#else
#define MANY 6
#define FEW 0
#define PASS 1
#endif

/* Float32 copies of x, for each block of rows [segments, length / CHUNK, rows, CHUNK]. */
typedef struct {
    float *x;
    int64_t row, rows, block; /* the stretch; rows of a block, the last may have fewer */
} Widened;

/* Of a segment. */
INLINE int64_t chunks_of(const Linear *p) { return (p->length + CHUNK - 1) / CHUNK; }

static void widen_rows(const Linear *p, int64_t row, int64_t stop, Widened *to) {
    int64_t rows = stop - row, blocks = (rows + MANY - 1) / MANY, each = chunks_of(p);
    int64_t chunks = p->segments * each;
    to->row = row, to->rows = rows, to->block = (rows + blocks - 1) / blocks;
    to->x = work_area((size_t)(rows * chunks * CHUNK) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        int64_t first = r / to->block * to->block;
        int64_t count = rows - first < to->block ? rows - first : to->block;
        float *put = to->x + (first * chunks + r - first) * CHUNK;
        const uint16_t *x = p->x + (row + r) * p->x_row;
        for (int64_t c = 0; c < chunks; c++, put += count * CHUNK) {
            int64_t from = c / each * p->length + c % each * CHUNK;
            for (int j = 0; j < CHUNK; j += VW)
                store(put, j, load_at(x, from + j, p->inputs, 1), 0);
        }
    }
}

/* sums [tiles / 2, rows, 2 * TILE] of a block by the tiles at w[], inputs in ascending order. */
INLINE void sum_tiles(int rows, int tiles, const float *x, const uint16_t *const *w,
                      int64_t inputs, float *sums) {
    vf sum[MANY][4];
    int vectors = tiles * SLICES;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) sum[r][j] = splat(0);
    for (int64_t k = 0; k < inputs; x += (rows - 1) * CHUNK) {
        int64_t end = k + CHUNK < inputs ? k + CHUNK : inputs;
        for (; k < end; k += 2, x += 2) {
            vu words[4];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++)
                memcpy(&words[j], w[j / SLICES] + k * TILE + j % SLICES * 2 * VW, sizeof words[j]);
#pragma GCC unroll 4
            for (int t = 0; t < tiles; t++) __builtin_prefetch(w[t] + (k + AHEAD_INPUTS) * TILE);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                vf even = splat(x[r * CHUNK]);
#pragma GCC unroll 4
                for (int j = 0; j < vectors; j++)
                    sum[r][j] = fused(even, (vf)(words[j] << 16), sum[r][j]);
            }
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                vf odd = splat(x[r * CHUNK + 1]);
#pragma GCC unroll 4
                for (int j = 0; j < vectors; j++)
                    sum[r][j] = fused(odd, (vf)(words[j] & 0xffff0000u), sum[r][j]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) {
            int tile = j / SLICES;
            float *put = sums + (tile / 2 * rows + r) * 2 * TILE + tile % 2 * TILE;
            store(put, j % SLICES * VW, sum[r][j], 0);
        }
}

/* A block by the tiles of one pair. */
INLINE void pair_rows(const Linear *p, int rows, const float *x, int64_t row, int64_t pair) {
    float sums[SEGMENTS][MANY * 2 * TILE];
    int64_t of_segment = chunks_of(p) * rows * CHUNK;
    for (int s = 0; s < p->segments; s++, x += of_segment) {
        int64_t from = s * p->length * TILE;
        const uint16_t *w[2] = {tile_at(p, pair, 0) + from, tile_at(p, pair, 1) + from};
#pragma GCC unroll 2
        for (int t = 0; t < 2; t += PASS)
            sum_tiles(rows, PASS, x, w + t, p->length, sums[s] + t * TILE);
    }
    add_segments(p, sums[0], MANY * 2 * TILE, rows * 2 * TILE);
    finish(p, row, rows, pair, tiles_in(p, pair), sums[0], 2 * TILE);
}

static void many_rows(const Linear *p, int rows, const float *x, int64_t row, int64_t pair) {
    switch (rows) {
    case 1: pair_rows(p, 1, x, row, pair); break;
    case 2: pair_rows(p, 2, x, row, pair); break;
    case 3: pair_rows(p, 3, x, row, pair); break;
    case 4: pair_rows(p, 4, x, row, pair); break;
    case 5: pair_rows(p, 5, x, row, pair); break;
#if MANY > 6
    case 6: pair_rows(p, 6, x, row, pair); break;
    case 7: pair_rows(p, 7, x, row, pair); break;
    case 8: pair_rows(p, 8, x, row, pair); break;
    case 9: pair_rows(p, 9, x, row, pair); break;
    case 10: pair_rows(p, 10, x, row, pair); break;
    case 11: pair_rows(p, 11, x, row, pair); break;
#endif
    default: pair_rows(p, MANY, x, row, pair);
    }
}

#if FEW
/* A block by the tiles of two pairs: W comes from memory in more streams. */
INLINE void pairs_rows(const Linear *p, int rows, const float *x, int64_t row, int64_t pair) {
    float sums[SEGMENTS][2 * FEW * 2 * TILE];
    int64_t of_segment = chunks_of(p) * rows * CHUNK;
    for (int s = 0; s < p->segments; s++, x += of_segment) {
        const uint16_t *w[4];
        for (int t = 0; t < 4; t++) w[t] = tile_at(p, pair + t / 2, t % 2) + s * p->length * TILE;
        sum_tiles(rows, 4, x, w, p->length, sums[s]);
    }
    add_segments(p, sums[0], 2 * FEW * 2 * TILE, 2 * rows * 2 * TILE);
    finish(p, row, rows, pair, 2, sums[0], 2 * TILE);
    finish(p, row, rows, pair + 1, tiles_in(p, pair + 1), sums[0] + rows * 2 * TILE, 2 * TILE);
}

static void few_rows(const Linear *p, int rows, const float *x, int64_t row, int64_t pair) {
    switch (rows) {
    case 1: pairs_rows(p, 1, x, row, pair); break;
    case 2: pairs_rows(p, 2, x, row, pair); break;
    case 3: pairs_rows(p, 3, x, row, pair); break;
    case 4: pairs_rows(p, 4, x, row, pair); break;
    case 5: pairs_rows(p, 5, x, row, pair); break;
    default: pairs_rows(p, FEW, x, row, pair);
    }
}
#endif

static void float_item(const Linear *p, const Widened *from, int64_t pair, int pairs) {
    int64_t chunks = p->segments * chunks_of(p);
    for (int64_t r = 0; r < from->rows; r += from->block) {
        int rows = (int)(from->rows - r < from->block ? from->rows - r : from->block), j = 0;
        const float *x = from->x + r * chunks * CHUNK;
#if FEW
        for (; rows <= FEW && j + 2 <= pairs; j += 2)
            few_rows(p, rows, x, from->row + r, pair + j);
#endif
        for (; j < pairs; j++) many_rows(p, rows, x, from->row + r, pair + j);
    }
}

#if DOTS
#define DOT_MANY 12 /* rows by the tiles of one pair */
#define DOT_FEW 6   /* rows by those of two */

/* Rows by two or four tiles. Meanwhile as much is fetched as two tiles, at next[], if any. */
INLINE void dot_tiles(int rows, int tiles, const Linear *p, int64_t row, int64_t pair,
                      const uint16_t *const *next) {
    const uint16_t *x = p->x + row * p->x_row, *w[4];
    float sums[SEGMENTS][2][DOT_MANY * 2 * TILE];
    for (int t = 0; t < tiles; t++) w[t] = tile_at(p, pair + t / 2, t % 2);
    for (int s = 0; s < p->segments; s++) {
        vf sum[DOT_MANY][4];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int t = 0; t < tiles; t++) sum[r][t] = splat(0);
        for (int64_t k = s * p->length, end = k + p->length; k < end; k += 2) {
            vf words[4];
#pragma GCC unroll 4
            for (int t = 0; t < tiles; t++) words[t] = load(w[t] + k * TILE, 0, 0);
#pragma GCC unroll 2
            for (int t = 0; next && t < 2; t++) __builtin_prefetch(next[t] + k * TILE, 0, 2);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                vf both = repeat(x + r * p->x_row + k);
#pragma GCC unroll 4
                for (int t = 0; t < tiles; t++) sum[r][t] = dot(both, words[t], sum[r][t]);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int t = 0; t < tiles; t++)
                store(sums[s][t / 2] + r * 2 * TILE + t % 2 * TILE, 0, sum[r][t], 0);
    }
    for (int t = 0; t < tiles; t += 2) {
        add_segments(p, sums[0][t / 2], 2 * DOT_MANY * 2 * TILE, rows * 2 * TILE);
        finish(p, row, rows, pair + t / 2, tiles_in(p, pair + t / 2), sums[0][t / 2], 2 * TILE);
    }
}

static void dot_pairs(int rows, const Linear *p, int64_t row, int64_t pair) {
    switch (rows) {
    case 1: dot_tiles(1, 4, p, row, pair, 0); break;
    case 2: dot_tiles(2, 4, p, row, pair, 0); break;
    case 3: dot_tiles(3, 4, p, row, pair, 0); break;
    case 4: dot_tiles(4, 4, p, row, pair, 0); break;
    case 5: dot_tiles(5, 4, p, row, pair, 0); break;
    default: dot_tiles(DOT_FEW, 4, p, row, pair, 0);
    }
}

static void dot_pair(int rows, const Linear *p, int64_t row, int64_t pair,
                     const uint16_t *const *next) {
    switch (rows) {
    case 1: dot_tiles(1, 2, p, row, pair, next); break;
    case 2: dot_tiles(2, 2, p, row, pair, next); break;
    case 3: dot_tiles(3, 2, p, row, pair, next); break;
    case 4: dot_tiles(4, 2, p, row, pair, next); break;
    case 5: dot_tiles(5, 2, p, row, pair, next); break;
    case 6: dot_tiles(6, 2, p, row, pair, next); break;
    case 7: dot_tiles(7, 2, p, row, pair, next); break;
    case 8: dot_tiles(8, 2, p, row, pair, next); break;
    case 9: dot_tiles(9, 2, p, row, pair, next); break;
    case 10: dot_tiles(10, 2, p, row, pair, next); break;
    case 11: dot_tiles(11, 2, p, row, pair, next); break;
    default: dot_tiles(DOT_MANY, 2, p, row, pair, next);
    }
}

/* A few rows are bound by reading W once, which the hardware does well. More would wait for it in
 * the first of their passes and multiply in all, so what comes next is fetched meanwhile, a tile in
 * each of two passes: the next pair, and at the end of the item the first one of `after`. */
static void dot_item(const Linear *p, int64_t row, int64_t stop, int64_t pair, int pairs,
                     int64_t after) {
    int64_t rows = stop - row, passes = (rows + DOT_MANY - 1) / DOT_MANY;
    int64_t block = (rows + passes - 1) / passes;
    if (pairs == 2 && rows <= DOT_FEW) {
        dot_pairs((int)rows, p, row, pair);
        return;
    }
    for (int j = 0; j < pairs; j++, pair++) {
        int64_t to = j + 1 < pairs ? pair + 1 : after;
        for (int64_t r = row, pass = 0; r < stop; r += block, pass++) {
            const uint16_t *next[2];
            for (int t = 0; t < 2; t++)
                next[t] = tile_at(p, passes == 1 || pass == t ? to : pair, t);
            dot_pair((int)(stop - r < block ? stop - r : block), p, r, pair, next);
        }
    }
}
#else
static void dot_item(const Linear *p, int64_t row, int64_t stop, int64_t pair, int pairs,
                     int64_t after) {
    (void)p, (void)row, (void)stop, (void)pair, (void)pairs, (void)after;
}
#endif

#endif
