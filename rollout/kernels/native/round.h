/* float32 as bfloat16 exactly as torch casts it: to nearest even, small numbers kept (the instruction
 * for it makes them zero); a NaN stays one. */
#ifndef ROLLOUT_ROUND_H
#define ROLLOUT_ROUND_H

#include <stdint.h>

static inline uint16_t rounded_half(uint32_t u) {
    uint32_t nan = (u & 0x7fffffff) > 0x7f800000 ? 0xffff : 0;
    return (uint16_t)((((u + 0x7fff + ((u >> 16) & 1)) >> 16) & ~nan) | (nan & 0x7fc0));
}

/* n values; strides in elements. */
static inline void round_all(uint16_t *to, int64_t to_stride, const uint32_t *from,
                             int64_t from_stride, int64_t n) {
    if (to_stride == 1 && from_stride == 1)
        for (int64_t i = 0; i < n; i++) to[i] = rounded_half(from[i]);
    else
        for (int64_t i = 0; i < n; i++) to[i * to_stride] = rounded_half(from[i * from_stride]);
}

#endif
