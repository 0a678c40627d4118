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

/* The lower two codes of each word as two bfloat16, which hold every code. */
#if DOTS
INLINE vu decoded(vi words) {
    const __m512i apart = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1));
    const __m512i subnormals = _mm512_castsi128_si512(
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i code = _mm512_shuffle_epi8((__m512i)words, apart);
    __m512i size = _mm512_and_si512(code, _mm512_set1_epi16(127));
    __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    __mmask32 small = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78));
    bits = _mm512_mask_permutexvar_epi16(bits, small, size, subnormals);
    __mmask32 none = _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(127));
    bits = _mm512_mask_mov_epi16(bits, none, _mm512_set1_epi16(0x7fc0));
    __m512i sign = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(128)), 8);
    return (vu)_mm512_or_si512(bits, sign);
}
#else
INLINE vu decoded(vi words) {
    vu even = (vu)from_e4m3(words & 255), odd = (vu)from_e4m3(words >> 8 & 255);
    return even >> 16 | (odd & 0xffff0000u);
}
#endif

#endif
