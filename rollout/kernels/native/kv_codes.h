/* Keys and values in 8 bits with a scale for each head; see kernels/kv_codes.py. */
#ifndef ROLLOUT_KV_CODES_H
#define ROLLOUT_KV_CODES_H
#include "float8.h"

#define MAX_CODED 1024 /* elements of a head that becomes codes */
enum { PLAIN, INT8, E4M3 }; /* what pages hold */

typedef int8_t vb __attribute__((vector_size(VW)));
typedef uint8_t vub __attribute__((vector_size(VW)));

#if VW == 16
INLINE vi grow_signed(vb b) { return (vi)_mm512_cvtepi8_epi32((__m128i)b); }
INLINE vi grow_bytes(vb b) { return (vi)_mm512_cvtepu8_epi32((__m128i)b); }
#else
INLINE vi grow_signed(vb b) { return __builtin_convertvector(b, vi); }
INLINE vi grow_bytes(vb b) { return __builtin_convertvector((vub)b, vi); }
#endif

/* Codes i .. i + VW of `size`, and twice as many, two in each; those behind the last are zero. */
INLINE vb load_codes(const char *codes, int64_t i, int64_t size) {
    char found[VW] = {0};
    vb b;
    if (i + VW <= size) return memcpy(&b, codes + i, sizeof b), b;
    for (int64_t j = i; j < size; j++) found[j - i] = codes[j];
    return memcpy(&b, found, sizeof b), b;
}
INLINE vh load_code_pairs(const char *codes, int64_t i, int64_t size) {
    char found[2 * VW] = {0};
    vh h;
    if (i + 2 * VW <= size) return memcpy(&h, codes + i, sizeof h), h;
    for (int64_t j = i; j < size; j++) found[j - i] = codes[j];
    return memcpy(&h, found, sizeof h), h;
}

/* What they stand for. */
INLINE vf from_codes(vb codes, int kind) {
    if (kind == E4M3) return from_e4m3(grow_bytes(codes));
    return __builtin_convertvector(grow_signed(codes), vf);
}
/* Of the lower two codes of each word two bfloat16, which hold every code. */
INLINE vu from_code_pairs(vi words, int kind) {
    if (kind == E4M3) return decoded(words);
    vf even = __builtin_convertvector(words << 24 >> 24, vf);
    vf odd = __builtin_convertvector(words << 16 >> 24, vf);
    return (vu)even >> 16 | (vu)odd;
}

/* The nearest codes of |v| < 464. */
INLINE vi to_e4m3(vf v) {
    vi bits = (vi)v, size = bits & 0x7fffffff, sign = bits >> 24 & 128;
    vi normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    vi small = rounded((vf)size * 512.0f);
    return (vi)blend(size < (121 << 23), (vf)small, (vf)normal) | sign;
}

#endif
