/* A linear of linear.c whose W is codes of float8, in tiles of 16 outputs by four inputs:
 * [outputs / 16, inputs / 4, 16, 4]. An item's two tiles are decoded into memory that stays in a
 * cache, as the bfloat16 that they are, and multiplied from there. */
#ifndef ROLLOUT_LINEAR_FLOAT8_H
#define ROLLOUT_LINEAR_FLOAT8_H

#include "area.h"
#include "float8.h"
#include "linear_amx.h"
#include "linear_vectors.h"

WORK_AREA(decoded_area)

typedef struct {
    const uint8_t *codes;
    const float *scales; /* [outputs, cells of `cell` inputs], or null: none */
    int64_t cell, cells;
} Coded;

INLINE vu scaled(vu two, vf scale) {
    vf even = (vf)(two << 16) * scale, odd = (vf)(two & 0xffff0000u) * scale;
    return grow(narrow(even)) | grow(narrow(odd)) << 16;
}

INLINE void decode_tile(const Linear *p, const Coded *c, int64_t tile, uint16_t *to, int scales) {
    const uint8_t *from = c->codes + tile * TILE * p->inputs;
    for (int64_t at = 0; at < p->inputs; at += c->cell) {
        int64_t end = at + c->cell < p->inputs ? at + c->cell : p->inputs;
        float of[TILE] = {0};
        for (int r = 0; scales && r < TILE; r++)
            of[r] = c->scales[(tile * TILE + r) * c->cells + at / c->cell];
        for (int64_t k = at; k < end; k += 4)
#pragma GCC unroll 4
            for (int j = 0; j < SLICES; j++) {
                vi words;
                memcpy(&words, from + k * TILE + j * 4 * VW, sizeof words);
                vu low = decoded(words), high = decoded(words >> 16);
                if (scales) {
                    vf scale = load(of, j * VW, 0);
                    low = scaled(low, scale), high = scaled(high, scale);
                }
                memcpy(to + k * TILE + j * 2 * VW, &low, sizeof low);
                memcpy(to + (k + 2) * TILE + j * 2 * VW, &high, sizeof high);
            }
    }
}

static void decode(const Linear *p, const Coded *c, int64_t tile, uint16_t *to) {
    if (c->scales) decode_tile(p, c, tile, to, 1);
    else decode_tile(p, c, tile, to, 0);
}

static void share_out_coded(Team *t, const Linear *p, const Coded *c, int32_t level) {
    Widened own = {.row = -1};
    int64_t tile = p->inputs * TILE, tiles = p->outputs / TILE;
    Linear here = *p; /* any pair lies in the decoded memory */
    uint16_t *to = decoded_area((size_t)tile * 2 * sizeof(uint16_t));
    here.w = to, here.between = 0, here.within = tile;
    for (int64_t i; (i = claim(t)) < p->items;) {
        int64_t pair = i % p->pairs, row = i / p->pairs * p->stretch;
        int64_t stop = row + p->stretch < p->rows ? row + p->stretch : p->rows;
        int64_t first = p->gated ? pair : 2 * pair, second = p->gated ? pair + p->pairs : first + 1;
        decode(p, c, first, to);
        if (second < tiles) decode(p, c, second, to + tile);
        if (!level && own.row != row) widen_rows(p, row, stop, &own);
        if (!level) float_item(&here, &own, pair, 1);
        else if (level > 1) amx_item(&here, row, stop, pair, 1);
        else dot_item(&here, row, stop, pair, 1, pair);
    }
}

#endif
