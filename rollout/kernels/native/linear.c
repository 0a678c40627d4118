/* y = x W^T + bias, where W [outputs, inputs] bfloat16 lies in tiles of 16 outputs by pairs of
 * inputs: [outputs / 16, inputs / 2, 16, 2]. That is what a dot-product instruction reads in one
 * load, and 16 such pairs are one B tile of AMX, so no copy of the weights in another order exists.
 * Gated, W is gate over up and y = silu(gate) * up, all rounded as separate ops would.
 *
 * One work item is two pairs of tiles (neighbours; or a gate and what it scales) and a stretch of
 * rows. Every output sums its inputs in one fixed order that depends on the machine alone: a row
 * has the same bits in any batch, on any number of threads. A few rows are bound by reading W once;
 * of many, a stretch of x stays in L2 while W passes. */
#include "vec.h"

#define TILE 16
#define GROUP 2        /* of one item */
#define CACHED (1 << 20)   /* bytes of a stretch of x */
#define SLICES (TILE / VW) /* vectors in the outputs of a tile */

typedef struct {
    const uint16_t *x, *w, *bias; /* bias may be null */
    uint16_t *out;
    int64_t x_row, rows, outputs, inputs; /* outputs of W */
    int64_t within, between; /* elements from the first tile of a pair to its second, to the next */
    int64_t pairs;
    int32_t gated, odd; /* odd: the last pair has no second tile */
} Linear;

/* Add the bias, round and store: sums [rows, stride] are what the tiles of pair `pair` gave. */
INLINE void finish(const Linear *p, int64_t row, int rows, int64_t pair, int tiles,
                   const float *sums, int stride) {
    int64_t first = p->gated ? pair * TILE : pair * 2 * TILE, up = p->outputs / 2;
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < (p->gated ? TILE : tiles * TILE); j += VW) {
            vf v = load(sums + r * stride, j, 0);
            if (p->bias) v += load(p->bias, first + j, 1);
            if (!p->gated) {
                store(p->out + (row + r) * p->outputs, first + j, v, 1);
                continue;
            }
            vf other = load(sums + r * stride + TILE, j, 0);
            if (p->bias) other += load(p->bias, up + first + j, 1);
            v = silu(round_to(v, 1), 1) * round_to(other, 1);
            store(p->out + (row + r) * up, first + j, v, 1);
        }
}

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

/* The kernel gives a process AMX's state on request only. */
static int amx_allowed(void) {
    static int allowed = -1; /* every thread would write the same */
    int known = __atomic_load_n(&allowed, __ATOMIC_RELAXED);
    if (known < 0) {
        known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
        __atomic_store_n(&allowed, known, __ATOMIC_RELAXED);
    }
    return known;
}

#define PAIRS 16         /* rows of a B tile */
#define DEPTH (2 * PAIRS) /* inputs of a tile */
#define FENCE() __asm__ volatile("" ::: "memory") /* gcc's tile loads do not say that they read */

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Config;

/* Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 of W; `low` and `high` rows of x. */
INLINE void configure(int low, int high) {
    Config c = {.palette = 1};
    int rows[8] = {low, low, high ? high : low, high ? high : low, low, high, PAIRS, PAIRS};
    for (int i = 0; i < 8; i++)
        if (rows[i]) c.rows[i] = (uint8_t)rows[i], c.bytes[i] = 64;
    FENCE();
    _tile_loadconfig(&c);
}

/* The last inputs % DEPTH inputs of x and of two pairs of tiles, padded with zeros. */
typedef struct {
    uint16_t x[2 * TILE][DEPTH], w[2 * GROUP][PAIRS][2 * TILE];
} Rest;
#define REST_TILE (PAIRS * 2 * TILE)

static void take_rest(const Linear *p, int64_t row, int rows, const uint16_t *w, int tiles,
                      Rest *rest) {
    int64_t from = p->inputs / DEPTH * DEPTH, count = p->inputs - from;
    memset(rest, 0, sizeof *rest);
    for (int r = 0; r < rows; r++)
        memcpy(rest->x[r], p->x + (row + r) * p->x_row + from, (size_t)count * 2);
    for (int t = 0; t < tiles; t++)
        memcpy(rest->w[t], w + t / 2 * p->between + t % 2 * p->within + from * TILE,
               (size_t)count * 2 * TILE);
    FENCE();
}

#define AHEAD (4 * DEPTH) /* inputs */
INLINE void fetch_tile(const uint16_t *w) {
    for (int i = 0; i < PAIRS; i++) __builtin_prefetch(w + i * 2 * TILE);
}

/* Up to 16 rows by up to four tiles. */
INLINE void narrow_step(const uint16_t *x, int64_t x_row, const uint16_t *w, int64_t within,
                        int64_t between, int tiles) {
    _tile_loadd(4, x, x_row * 2);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (tiles < 2) return;
    _tile_loadd(7, w + within, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (tiles < 3) return;
    _tile_loadd(6, w + between, 64);
    _tile_dpbf16ps(2, 4, 6);
    if (tiles < 4) return;
    _tile_loadd(7, w + between + within, 64);
    _tile_dpbf16ps(3, 4, 7);
}

INLINE void narrow_rows(const Linear *p, int64_t row, int rows, int64_t pair, int tiles) {
    float sums[GROUP][TILE][2 * TILE];
    const uint16_t *x = p->x + row * p->x_row, *w = p->w + pair * p->between;
    int64_t whole = p->inputs / DEPTH * DEPTH;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < whole; k += DEPTH) {
        if (k + AHEAD < whole)
            for (int t = 0; t < tiles; t++)
                fetch_tile(w + t / 2 * p->between + t % 2 * p->within + (k + AHEAD) * TILE);
        narrow_step(x + k, p->x_row, w + k * TILE, p->within, p->between, tiles);
    }
    if (whole < p->inputs) {
        Rest rest;
        take_rest(p, row, rows, w, tiles, &rest);
        narrow_step(rest.x[0], DEPTH, rest.w[0][0], REST_TILE, 2 * REST_TILE, tiles);
    }
    _tile_stored(0, sums[0][0], 128);
    _tile_stored(1, sums[0][0] + TILE, 128);
    _tile_stored(2, sums[1][0], 128);
    _tile_stored(3, sums[1][0] + TILE, 128);
    FENCE();
    finish(p, row, rows, pair, tiles < 2 ? tiles : 2, sums[0][0], 2 * TILE);
    if (tiles > 2) finish(p, row, rows, pair + 1, tiles - 2, sums[1][0], 2 * TILE);
}

/* 17 to 32 rows by the tiles of one pair. */
INLINE void wide_step(const uint16_t *x, int64_t x_row, const uint16_t *w, int64_t within,
                      int tiles) {
    _tile_loadd(4, x, x_row * 2);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, x + TILE * x_row, x_row * 2);
    _tile_dpbf16ps(2, 5, 6);
    if (tiles < 2) return;
    _tile_loadd(7, w + within, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
}

INLINE void wide_rows(const Linear *p, int64_t row, int rows, int64_t pair, int tiles) {
    float sums[2 * TILE][2 * TILE];
    const uint16_t *x = p->x + row * p->x_row, *w = p->w + pair * p->between;
    int64_t whole = p->inputs / DEPTH * DEPTH;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < whole; k += DEPTH) {
        if (k + AHEAD < whole)
            for (int t = 0; t < tiles; t++) fetch_tile(w + t * p->within + (k + AHEAD) * TILE);
        wide_step(x + k, p->x_row, w + k * TILE, p->within, tiles);
    }
    if (whole < p->inputs) {
        Rest rest;
        take_rest(p, row, rows, w, tiles, &rest);
        wide_step(rest.x[0], DEPTH, rest.w[0][0], REST_TILE, tiles);
    }
    _tile_stored(0, sums[0], 128);
    _tile_stored(1, sums[0] + TILE, 128);
    _tile_stored(2, sums[TILE], 128);
    _tile_stored(3, sums[TILE] + TILE, 128);
    FENCE();
    finish(p, row, rows, pair, tiles, sums[0], 2 * TILE);
}

INLINE int tiles_of(const Linear *p, int64_t pair, int64_t pairs) {
    return (int)(2 * pairs) - (p->odd && pair + pairs == p->pairs);
}

static void amx_item(const Linear *p, int64_t row, int64_t stop, int64_t pair, int pairs) {
    int shape = 0;
    for (; row < stop; row += 2 * TILE) {
        int rows = stop - row < 2 * TILE ? (int)(stop - row) : 2 * TILE;
        if (rows != shape) configure(rows < TILE ? rows : TILE, rows > TILE ? rows - TILE : 0);
        shape = rows;
        int tiles = tiles_of(p, pair, pairs);
        if (rows > TILE) {
            for (int j = 0; j < pairs; j++)
                if (tiles - 2 * j > 1) wide_rows(p, row, rows, pair + j, 2);
                else wide_rows(p, row, rows, pair + j, 1);
        } else if (tiles == 2 * GROUP) {
            narrow_rows(p, row, rows, pair, 2 * GROUP);
        } else {
            narrow_rows(p, row, rows, pair, tiles);
        }
    }
    _tile_release();
}
#else
static int amx_allowed(void) { return 0; }
static void amx_item(const Linear *p, int64_t row, int64_t stop, int64_t pair, int pairs) {
    (void)p, (void)row, (void)stop, (void)pair, (void)pairs;
}
#endif

#if VW == 16
#define ROW_BLOCK 6
#define PAIR_BLOCK 2
#else
#define ROW_BLOCK 4
#define PAIR_BLOCK 1
#endif

/* sum += the pair of inputs in `x` times those of VW outputs. */
INLINE vf dot(vf sum, uint32_t x, vu w) {
#if VW == 16 && defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)w);
#else
    vu pair = x - (vu){0};
    sum += (vf)(pair << 16) * (vf)(w << 16);
    return sum + (vf)(pair & 0xffff0000u) * (vf)(w & 0xffff0000u);
#endif
}

INLINE void dot_tile(int rows, int tiles, const Linear *p, int64_t row, int64_t pair) {
    const uint16_t *x = p->x + row * p->x_row, *w = p->w + pair * p->between;
    float sums[PAIR_BLOCK][ROW_BLOCK][2 * TILE];
    vf sum[ROW_BLOCK][2 * PAIR_BLOCK * SLICES];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < tiles * SLICES; j++) sum[r][j] = splat(0);
    for (int64_t k = 0; k < p->inputs; k += 2) {
        vu words[2 * PAIR_BLOCK * SLICES];
#pragma GCC unroll 8
        for (int j = 0; j < tiles * SLICES; j++) {
            int t = j / SLICES;
            const uint16_t *from = w + t / 2 * p->between + t % 2 * p->within + k * TILE;
            memcpy(&words[j], from + j % SLICES * 2 * VW, sizeof words[j]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            uint32_t x_pair;
            memcpy(&x_pair, x + r * p->x_row + k, sizeof x_pair);
#pragma GCC unroll 8
            for (int j = 0; j < tiles * SLICES; j++) sum[r][j] = dot(sum[r][j], x_pair, words[j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < tiles * SLICES; j++)
            store(sums[j / SLICES / 2][r], j % (2 * SLICES) * VW, sum[r][j], 0);
    finish(p, row, rows, pair, tiles < 2 ? tiles : 2, sums[0][0], 2 * TILE);
    if (tiles > 2) finish(p, row, rows, pair + 1, tiles - 2, sums[1 % PAIR_BLOCK][0], 2 * TILE);
}

INLINE void dot_rows(int rows, int tiles, const Linear *p, int64_t row, int64_t pair) {
    switch (rows) {
    case 1: dot_tile(1, tiles, p, row, pair); break;
    case 2: dot_tile(2, tiles, p, row, pair); break;
    case 3: dot_tile(3, tiles, p, row, pair); break;
#if ROW_BLOCK == 6
    case 4: dot_tile(4, tiles, p, row, pair); break;
    case 5: dot_tile(5, tiles, p, row, pair); break;
#endif
    default: dot_tile(ROW_BLOCK, tiles, p, row, pair);
    }
}

static void dot_item(const Linear *p, int64_t row, int64_t stop, int64_t pair, int pairs) {
    for (; row < stop; row += ROW_BLOCK) {
        int rows = stop - row < ROW_BLOCK ? (int)(stop - row) : ROW_BLOCK, j = 0, last = pairs;
        if (p->odd && pair + pairs == p->pairs) last--;
        for (; j + PAIR_BLOCK <= last; j += PAIR_BLOCK)
            dot_rows(rows, 2 * PAIR_BLOCK, p, row, pair + j);
        for (; j < last; j++) dot_rows(rows, 2, p, row, pair + j);
        if (last < pairs) dot_rows(rows, 1, p, row, pair + last);
    }
}

/* 2: AMX; 1: bfloat16 dot products of AVX-512; 0: plain vectors. */
EXPORT int32_t rollout_linear_level(void) {
    if (amx_allowed()) return 2;
#if VW == 16 && defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

/* float32 lanes of a vector: 16 AVX-512, 8 AVX2, 4 what every machine has. */
EXPORT int32_t rollout_vector_width(void) { return VW; }

/* outputs: a multiple of 16 (of 32 where gated); inputs: even; `level` at most that of
 * rollout_linear_level. */
EXPORT void rollout_linear(const uint16_t *x, int64_t x_row, const uint16_t *w,
                           const uint16_t *bias, uint16_t *out, int64_t rows, int64_t outputs,
                           int64_t inputs, int32_t gated, int32_t level, int32_t threads) {
    int64_t tile = inputs * TILE, tiles = outputs / TILE, pairs = (tiles + 1) / 2;
    Linear p = {.x = x, .w = w, .bias = bias, .out = out, .x_row = x_row, .rows = rows};
    p.outputs = outputs, p.inputs = inputs, p.pairs = pairs, p.odd = tiles % 2, p.gated = gated;
    p.within = gated ? pairs * tile : tile, p.between = gated ? tile : 2 * tile;
    int64_t stretch = CACHED / (inputs * 2) / (2 * TILE) * (2 * TILE);
    if (stretch < 2 * TILE) stretch = 2 * TILE;
    int64_t groups = (pairs + GROUP - 1) / GROUP, items = (rows + stretch - 1) / stretch * groups;
    if (items < 2 || rows * outputs * inputs < 65536) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
    for (int64_t i = 0; i < items; i++) {
        int64_t row = i / groups * stretch, pair = i % groups * GROUP;
        int64_t stop = row + stretch < rows ? row + stretch : rows;
        int count = (int)(pairs - pair < GROUP ? pairs - pair : GROUP);
        (level > 1 ? amx_item : dot_item)(&p, row, stop, pair, count);
    }
}
