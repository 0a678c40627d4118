/* What bytes of float8 (e4m3) stand for. */
#ifndef ROLLOUT_FLOAT8_H
#define ROLLOUT_FLOAT8_H
#include "vec.h"

/* Subnormals go through integers: no denormal is ever loaded. */
INLINE vf from_e4m3(vi code) {
    vi size = code & 127, sign = (code & 128) << 24;
    vf normal = (vf)((size << 20) + (120 << 23));
    vf small = __builtin_convertvector(size, vf) * 0x1p-9f;
    vf v = blend(size < 8, small, normal);
    v = blend(size == 127, splat(NAN), v);
    return (vf)((vi)v | sign);
}

#endif
