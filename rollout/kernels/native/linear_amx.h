/* Rows by tiles of linear.c with AMX: 16 rows by 32 inputs times a tile of W. */
#ifndef ROLLOUT_LINEAR_AMX_H
#define ROLLOUT_LINEAR_AMX_H

#include "linear_common.h"

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

/* The last length % DEPTH inputs of a segment, of x and of two pairs of tiles, padded with zeros. */
typedef struct {
    uint16_t x[2 * TILE][DEPTH], w[2 * GROUP][PAIRS][2 * TILE];
} Rest;
#define REST_TILE (PAIRS * 2 * TILE)

/* x, w: of the segment. */
static void take_rest(const Linear *p, const uint16_t *x, int rows, const uint16_t *w, int tiles,
                      Rest *rest) {
    int64_t from = p->length / DEPTH * DEPTH, count = p->length - from;
    memset(rest, 0, sizeof *rest);
    for (int r = 0; r < rows; r++)
        memcpy(rest->x[r], x + r * p->x_row + from, (size_t)count * 2);
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

/* As narrow_step or, `wide`, as wide_step. */
INLINE void amx_rows(const Linear *p, int64_t row, int rows, int64_t pair, int tiles, int wide) {
    float sums[SEGMENTS][GROUP][TILE][2 * TILE]; /* wide: of rows 16 to 31, not of a second pair */
    const uint16_t *x = p->x + row * p->x_row, *w = p->w + pair * p->between;
    int64_t whole = p->length / DEPTH * DEPTH;
    for (int s = 0; s < p->segments; s++, x += p->length, w += p->length * TILE) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < whole; k += DEPTH) {
            if (k + AHEAD < whole)
                for (int t = 0; t < tiles; t++)
                    fetch_tile(w + t / 2 * p->between + t % 2 * p->within + (k + AHEAD) * TILE);
            if (wide) wide_step(x + k, p->x_row, w + k * TILE, p->within, tiles);
            else narrow_step(x + k, p->x_row, w + k * TILE, p->within, p->between, tiles);
        }
        if (whole < p->length) {
            Rest rest;
            take_rest(p, x, rows, w, tiles, &rest);
            if (wide) wide_step(rest.x[0], DEPTH, rest.w[0][0], REST_TILE, tiles);
            else narrow_step(rest.x[0], DEPTH, rest.w[0][0], REST_TILE, 2 * REST_TILE, tiles);
        }
        _tile_stored(0, sums[s][0][0], 128);
        _tile_stored(1, sums[s][0][0] + TILE, 128);
        _tile_stored(2, sums[s][1][0], 128);
        _tile_stored(3, sums[s][1][0] + TILE, 128);
        FENCE();
    }
    for (int g = 0; g < (wide ? 1 : (tiles + 1) / 2); g++)
        add_segments(p, sums[0][g][0], GROUP * TILE * 2 * TILE, rows * 2 * TILE);
    finish(p, row, rows, pair, tiles < 2 ? tiles : 2, sums[0][0][0], 2 * TILE);
    if (tiles > 2) finish(p, row, rows, pair + 1, tiles - 2, sums[0][1][0], 2 * TILE);
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
                if (tiles - 2 * j > 1) amx_rows(p, row, rows, pair + j, 2, 1);
                else amx_rows(p, row, rows, pair + j, 1, 1);
        } else if (tiles == 2 * GROUP) {
            amx_rows(p, row, rows, pair, 2 * GROUP, 0);
        } else {
            amx_rows(p, row, rows, pair, tiles, 0);
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

#endif
