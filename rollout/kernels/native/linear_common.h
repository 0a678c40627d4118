/* What a linear of linear.c is, and what its ways of multiplying share: how sums of segments become
 * one, and how they are stored. */
#ifndef ROLLOUT_LINEAR_COMMON_H
#define ROLLOUT_LINEAR_COMMON_H

#include "ops.h"
#include "vec.h"

#define TILE 16
#define GROUP 2        /* of one item */
#define SEGMENTS 4     /* at most */
#define CACHED (1 << 20)   /* bytes of a stretch of x as it is multiplied */
#define SLICES (TILE / VW) /* vectors in the outputs of a tile */

typedef struct {
    const uint16_t *x, *w, *bias; /* bias may be null */
    void *out;
    int64_t x_row, rows, outputs, inputs; /* outputs of W */
    int64_t within, between; /* elements from the first tile of a pair to its second, to the next */
    int64_t pairs;
    int64_t stretch, groups, items; /* rows and groups of pairs that make an item */
    int64_t length;         /* inputs of a segment: even */
    int32_t segments;       /* 1, 2 or 4 */
    int32_t gated, odd; /* odd: the last pair has no second tile */
    int32_t wide;       /* the sums are stored as they are, without a bias */
} Linear;

/* The sums of the first segment become those of all: `count` floats lie `apart` from the next. */
INLINE void add_segments(const Linear *p, float *sums, int apart, int count) {
    for (int step = 1; step < p->segments; step *= 2)
        for (int s = 0; s < p->segments; s += 2 * step)
            for (int i = 0; i < count; i += VW) {
                float *to = sums + s * apart;
                store(to, i, load(to, i, 0) + load(to + step * apart, i, 0), 0);
            }
}

/* Add the bias, round and store: sums [rows, stride] are what the tiles of pair `pair` gave. */
INLINE void finish(const Linear *p, int64_t row, int rows, int64_t pair, int tiles,
                   const float *sums, int stride) {
    int64_t first = p->gated ? pair * TILE : pair * 2 * TILE, up = p->outputs / 2;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < (p->gated ? TILE : tiles * TILE); j += VW) {
            vf v = load(sums + r * stride, j, 0);
            if (p->wide) {
                store((float *)p->out + (row + r) * p->outputs, first + j, v, 0);
                continue;
            }
            if (p->bias) v += load(p->bias, first + j, 1);
            if (!p->gated) {
                store((uint16_t *)p->out + (row + r) * p->outputs, first + j, v, 1);
                continue;
            }
            vf other = load(sums + r * stride + TILE, j, 0);
            if (p->bias) other += load(p->bias, up + first + j, 1);
            v = silu(round_to(v, 1), 1) * round_to(other, 1);
            store((uint16_t *)p->out + (row + r) * up, first + j, v, 1);
        }
}

#endif
