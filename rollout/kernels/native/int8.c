/* y = x W^T + bias of a weight in int8: [outputs / 16, inputs / 4, 16, 4] codes, so that four
 * inputs of 16 outputs are one load, and a float32 scale of each output. Each row of x is quantised
 * by its largest value, the sums are exact integers: the bits do not depend on the batch, and are
 * those of the reference but for the last rounding. Work is cut as in linear.c. */
#include "area.h"
#include "int8.h"
#include "ops.h"

#define TILE 16
#define GROUP 2           /* pairs of tiles in an item */
#define CACHED (1 << 19)  /* bytes of codes of a stretch of x */
#define MANY 12           /* rows by the tiles of one pair */
#define FEW 5             /* rows by those of two */
typedef struct {
    const uint16_t *x, *bias; /* bias may be null */
    const int8_t *w;
    const float *scale;
    uint16_t *out;
    int64_t x_row, rows, outputs, inputs;
    int64_t within, between; /* bytes from the first tile of a pair to its second, to the next */
    int64_t pairs, stretch, groups, items;
    int32_t gated, odd;
} Int8;

/* A thread's codes of a stretch of rows, and a scale of each row. */
typedef struct {
    uint8_t *x;
    float *scale;
    int64_t row;
} Codes;

static void quantize_stretch(const Int8 *p, int64_t row, int64_t stop, Codes *to) {
    int64_t count = stop - row;
    char *area = work_area((size_t)(count * p->inputs + 64) + (size_t)count * sizeof(float));
    to->row = row, to->scale = (float *)area, to->x = (uint8_t *)(to->scale + count);
    for (int64_t r = 0; r < count; r++)
        to->scale[r] = quantize_row(p->x + (row + r) * p->x_row, p->inputs, 1, OFFSET,
                                    to->x + r * p->inputs);
}

INLINE const int8_t *tile_at(const Int8 *p, int64_t pair, int tile) {
    int alone = p->odd && pair == p->pairs - 1;
    return p->w + pair * p->between + (alone ? 0 : tile * p->within);
}

/* Scale, add the bias, round and store: sums [rows, stride] of the tiles of one pair. */
INLINE void finish(const Int8 *p, const Codes *from, int64_t r0, int rows, int64_t pair,
                   const int32_t *sums, int stride) {
    int64_t first = p->gated ? pair * TILE : pair * 2 * TILE, up = p->outputs / 2;
    int tiles = p->odd && pair == p->pairs - 1 ? 1 : 2;
    for (int r = 0; r < rows; r++) {
        float own = from->scale[r0 + r];
        int64_t row = from->row + r0 + r;
        for (int j = 0; j < (p->gated ? TILE : tiles * TILE); j += VW) {
            vi sum;
            memcpy(&sum, sums + r * stride + j, sizeof sum);
            vf v = __builtin_convertvector(sum, vf) * (own * load(p->scale, first + j, 0));
            if (p->bias) v += load(p->bias, first + j, 1);
            if (!p->gated) {
                store(p->out + row * p->outputs, first + j, v, 1);
                continue;
            }
            memcpy(&sum, sums + r * stride + TILE + j, sizeof sum);
            vf other = __builtin_convertvector(sum, vf) * (own * load(p->scale, up + first + j, 0));
            if (p->bias) other += load(p->bias, up + first + j, 1);
            v = silu(round_to(v, 1), 1) * round_to(other, 1);
            store(p->out + row * up, first + j, v, 1);
        }
    }
}

#if VNNI
#define DOT4(sum, x, w) (vi) _mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(x), (__m512i)(w))
#endif

/* Rows by two or four tiles; as much is fetched meanwhile as two tiles, at next[], if any. */
INLINE void int8_tiles(int rows, int tiles, const Int8 *p, const Codes *from, int64_t r0,
                       int64_t pair, const int8_t *const *next) {
    const uint8_t *x = from->x + r0 * p->inputs;
    const int8_t *w[4];
    int32_t sums[2][MANY * 2 * TILE];
    for (int t = 0; t < tiles; t++) w[t] = tile_at(p, pair + t / 2, t % 2);
#if VNNI
    vi sum[MANY][4], above[4], offset = (vi)repeat(&(uint32_t){0x80808080u});
#pragma GCC unroll 4
    for (int t = 0; t < tiles; t++) above[t] = (vi){0};
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int t = 0; t < tiles; t++) sum[r][t] = (vi){0};
    for (int64_t k = 0; k < p->inputs; k += 4) {
        vi words[4];
#pragma GCC unroll 4
        for (int t = 0; t < tiles; t++) {
            memcpy(&words[t], w[t] + k * TILE, sizeof words[t]);
            above[t] = DOT4(above[t], offset, words[t]);
        }
#pragma GCC unroll 2
        for (int t = 0; next && t < 2; t++) __builtin_prefetch(next[t] + k * TILE, 0, 2);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            vi four = (vi)repeat(x + r * p->inputs + k);
#pragma GCC unroll 4
            for (int t = 0; t < tiles; t++) sum[r][t] = DOT4(sum[r][t], four, words[t]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int t = 0; t < tiles; t++) {
            vi v = sum[r][t] - above[t];
            memcpy(sums[t / 2] + r * 2 * TILE + t % 2 * TILE, &v, sizeof v);
        }
#else
    (void)next;
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tiles; t++) {
            int32_t *sum = sums[t / 2] + r * 2 * TILE + t % 2 * TILE;
            memset(sum, 0, TILE * sizeof *sum);
            for (int64_t k = 0; k < p->inputs; k += 4) {
                const uint8_t *four = x + r * p->inputs + k;
                const int8_t *word = w[t] + k * TILE;
                for (int n = 0; n < TILE; n++)
                    for (int q = 0; q < 4; q++) sum[n] += (four[q] - OFFSET) * word[4 * n + q];
            }
        }
#endif
    for (int t = 0; t < tiles; t += 2)
        finish(p, from, r0, rows, pair + t / 2, sums[t / 2], 2 * TILE);
}

static void four_tiles(int rows, const Int8 *p, const Codes *from, int64_t r0, int64_t pair) {
    switch (rows) {
    case 1: int8_tiles(1, 4, p, from, r0, pair, 0); break;
    case 2: int8_tiles(2, 4, p, from, r0, pair, 0); break;
    case 3: int8_tiles(3, 4, p, from, r0, pair, 0); break;
    case 4: int8_tiles(4, 4, p, from, r0, pair, 0); break;
    default: int8_tiles(FEW, 4, p, from, r0, pair, 0);
    }
}

static void two_tiles(int rows, const Int8 *p, const Codes *from, int64_t r0, int64_t pair,
                      const int8_t *const *next) {
    switch (rows) {
    case 1: int8_tiles(1, 2, p, from, r0, pair, next); break;
    case 2: int8_tiles(2, 2, p, from, r0, pair, next); break;
    case 3: int8_tiles(3, 2, p, from, r0, pair, next); break;
    case 4: int8_tiles(4, 2, p, from, r0, pair, next); break;
    case 5: int8_tiles(5, 2, p, from, r0, pair, next); break;
    case 6: int8_tiles(6, 2, p, from, r0, pair, next); break;
    case 7: int8_tiles(7, 2, p, from, r0, pair, next); break;
    case 8: int8_tiles(8, 2, p, from, r0, pair, next); break;
    case 9: int8_tiles(9, 2, p, from, r0, pair, next); break;
    case 10: int8_tiles(10, 2, p, from, r0, pair, next); break;
    case 11: int8_tiles(11, 2, p, from, r0, pair, next); break;
    default: int8_tiles(MANY, 2, p, from, r0, pair, next);
    }
}

/* As dot_item of linear_vectors.h: of many rows, what comes next is fetched meanwhile. */
static void int8_item(const Int8 *p, const Codes *from, int64_t rows, int64_t pair, int pairs,
                      int64_t after) {
    int64_t passes = (rows + MANY - 1) / MANY, block = (rows + passes - 1) / passes;
    if (pairs == 2 && rows <= FEW) {
        four_tiles((int)rows, p, from, 0, pair);
        return;
    }
    for (int j = 0; j < pairs; j++, pair++) {
        int64_t to = j + 1 < pairs ? pair + 1 : after;
        for (int64_t r = 0, pass = 0; r < rows; r += block, pass++) {
            const int8_t *next[2];
            for (int t = 0; t < 2; t++)
                next[t] = tile_at(p, passes == 1 || pass == t ? to : pair, t);
            two_tiles((int)(rows - r < block ? rows - r : block), p, from, r, pair, next);
        }
    }
}

static Int8 prepared(const uint16_t *x, int64_t x_row, const int8_t *w, const float *scale,
                     const uint16_t *bias, uint16_t *out, int64_t rows, int64_t outputs,
                     int64_t inputs, int32_t gated) {
    int64_t tile = inputs * TILE, tiles = outputs / TILE, pairs = (tiles + 1) / 2;
    Int8 p = {.x = x, .w = w, .scale = scale, .bias = bias, .out = out, .x_row = x_row};
    p.rows = rows, p.outputs = outputs, p.inputs = inputs, p.pairs = pairs, p.odd = tiles % 2;
    p.gated = gated;
    p.within = gated ? pairs * tile : tile, p.between = gated ? tile : 2 * tile;
    p.stretch = CACHED / inputs / MANY * MANY;
    if (p.stretch < 2 * MANY) p.stretch = 2 * MANY;
    p.groups = (pairs + GROUP - 1) / GROUP;
    p.items = (rows + p.stretch - 1) / p.stretch * p.groups;
    return p;
}

static void share_out(Team *t, const Int8 *p, int32_t threads) {
    Codes own = {.row = -1}; /* each thread quantises the rows that it multiplies */
    for (int64_t i; (i = claim(t)) < p->items;) {
        int64_t next = i + threads < p->items ? i + threads : i;
        int64_t row = i / p->groups * p->stretch, pair = i % p->groups * GROUP;
        int64_t stop = row + p->stretch < p->rows ? row + p->stretch : p->rows;
        int count = (int)(p->pairs - pair < GROUP ? p->pairs - pair : GROUP);
        if (own.row != row) quantize_stretch(p, row, stop, &own);
        int8_item(p, &own, stop - row, pair, count, next % p->groups * GROUP);
    }
}

/* outputs: a multiple of 16 (of 32 where gated); inputs: of 4. */
void int8_part(Team *t, const uint16_t *x, int64_t x_row, const int8_t *w, const float *scale,
               const uint16_t *bias, uint16_t *out, int64_t rows, int64_t outputs, int64_t inputs,
               int32_t gated, int32_t threads) {
    Int8 p = prepared(x, x_row, w, scale, bias, out, rows, outputs, inputs, gated);
    share_out(t, &p, threads);
}

EXPORT void rollout_int8_linear(const uint16_t *x, int64_t x_row, const int8_t *w,
                                const float *scale, const uint16_t *bias, uint16_t *out,
                                int64_t rows, int64_t outputs, int64_t inputs, int32_t gated,
                                int32_t threads) {
    Int8 p = prepared(x, x_row, w, scale, bias, out, rows, outputs, inputs, gated);
    Team team = {0};
    if (p.items < 2 || rows * outputs * inputs < 65536) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    share_out(&team, &p, threads);
}

/* Rows of float32 or bfloat16 as int8, with a scale of each. */
EXPORT void rollout_quantize_rows(const char *x, int64_t x_row, int32_t bf16, int64_t rows,
                                  int64_t columns, uint8_t *codes, float *scales,
                                  int32_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++)
        scales[r] = quantize_row(x + r * x_row * (bf16 ? 2 : 4), columns, bf16, 0,
                                 codes + r * columns);
}
