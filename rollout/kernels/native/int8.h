/* Inputs as codes of eight bits, which dot products with a weight's codes take. */
#ifndef ROLLOUT_INT8_H
#define ROLLOUT_INT8_H

#include "vec.h"

#include <float.h>

#define OFFSET 128        /* codes of x are kept without a sign, as the instruction wants them */
#if VW == 16 && defined(__AVX512VNNI__)
#define VNNI 1
#else
#define VNNI 0
#endif

/* The codes of one row, plus `offset`, and its scale; a row with a NaN has none that is finite. */
static float quantize_row(const void *x, int64_t inputs, int bf16, int offset, uint8_t *codes) {
    vf most = splat(0);
    vi bad = {0};
    for (int64_t i = 0; i < inputs; i += VW) {
        vf v = load_at(x, i, inputs, bf16);
        bad |= v != v;
        most = vmax(most, (vf)((vi)v & 0x7fffffff));
    }
    float scale = reduce_max(most) / 127.0f;
    for (int j = 0; j < VW; j++)
        if (bad[j]) scale = NAN;
    if (scale < FLT_MIN) scale = FLT_MIN;
    for (int64_t i = 0; i < inputs; i += VW) {
        vf v = load_at(x, i, inputs, bf16) / scale;
        v = blend(v != v, splat(0), v);
        v = vmin(vmax(v, splat(-127)), splat(127));
        store_bytes(codes + i, rounded(v) + offset, inputs - i < VW ? (int)(inputs - i) : VW);
    }
    return scale;
}

#endif
