/* Vectors of the machine's width in the vector extension of gcc and clang: the same code is
 * AVX-512, AVX2 or NEON. Intrinsics only where gcc 12 makes a detour of one AVX-512 instruction.
 * Tails go through zero-padded buffers. */
#ifndef ROLLOUT_VEC_H
#define ROLLOUT_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define VW 16
#include <immintrin.h>
#elif defined(__AVX2__)
#define VW 8
#else
#define VW 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

#if VW == 16 && defined(__AVX512BF16__)
#define DOTS 1 /* there are dot products of bfloat16 */
#else
#define DOTS 0
#endif

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));

#if VW == 16
#define LANES ((vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#elif VW == 8
#define LANES ((vi){0, 1, 2, 3, 4, 5, 6, 7})
#else
#define LANES ((vi){0, 1, 2, 3})
#endif

INLINE vf splat(float x) { return x - (vf){0}; }
/* The word at `word`, whatever it holds, in all lanes. */
INLINE vf repeat(const void *word) {
    uint32_t bits;
    memcpy(&bits, word, sizeof bits);
    return (vf)(bits - (vu){0});
}
#if VW == 16
INLINE vf blend(vi mask, vf yes, vf no) {
    return (vf)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)no, (__m512)yes);
}
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE vf blend(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vf vmax(vf a, vf b) { return blend(a > b, a, b); }
INLINE vf vmin(vf a, vf b) { return blend(a < b, a, b); }
#endif

/* a * b + c, rounded once where the machine can. Said outright: left to itself a compiler may fuse
 * the same expression in one block and not in another, so build.py has it fuse none. */
#if VW == 16
INLINE vf fused(vf a, vf b, vf c) {
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif defined(__x86_64__) && !defined(__FMA__)
INLINE vf fused(vf a, vf b, vf c) { return a * b + c; }
#else
INLINE vf fused(vf a, vf b, vf c) {
    vf out;
    for (int i = 0; i < VW; i++) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return out;
}
#endif

#if defined(__clang__)
INLINE vf rotate(vf v, int by) {
    vf out;
    for (int i = 0; i < VW; i++) out[i] = v[(i + by) & (VW - 1)];
    return out;
}
#else
INLINE vf rotate(vf v, int by) { return __builtin_shuffle(v, (LANES + by) & (VW - 1)); }
#endif

INLINE float reduce_sum(vf v) {
#pragma GCC unroll 4
    for (int by = VW / 2; by; by /= 2) v += rotate(v, by);
    return v[0];
}
INLINE float reduce_max(vf v) {
#pragma GCC unroll 4
    for (int by = VW / 2; by; by /= 2) v = vmax(v, rotate(v, by));
    return v[0];
}

/* bfloat16 is the upper half of a float32; rounding is to nearest even, a NaN stays one. */
#if VW == 16
INLINE vu grow(vh h) { return (vu)_mm512_cvtepu16_epi32((__m256i)h); }
INLINE vh shrink(vu u) { return (vh)_mm512_cvtepi32_epi16((__m512i)u); }
#else
INLINE vu grow(vh h) { return __builtin_convertvector(h, vu); }
INLINE vh shrink(vu u) { return __builtin_convertvector(u, vh); }
#endif
INLINE vf widen(vh h) { return (vf)(grow(h) << 16); }
#if DOTS
INLINE vh narrow(vf v) { return (vh)_mm512_cvtneps_pbh((__m512)v); } /* denormals become zero */
#else
INLINE vh narrow(vf v) {
    vu u = (vu)v;
    u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vu nan = (vu)(v != v);
    return shrink((u & ~nan) | (nan & 0x7fc0));
}
#endif
/* Of words of two bfloat16: a0 * b0 + a1 * b1 + c in each lane. Only where DOTS. */
#if DOTS
INLINE vf dot(vf a, vf b, vf c) {
    return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}
#else
INLINE vf dot(vf a, vf b, vf c) { return (void)a, (void)b, c; }
#endif
INLINE vf round_to(vf v, int bf16) { return bf16 ? widen(narrow(v)) : v; }

/* Elements i .. i + VW of an array of float32 or bfloat16. */
INLINE vf load(const void *p, int64_t i, int bf16) {
    if (bf16) {
        vh h;
        memcpy(&h, (const uint16_t *)p + i, sizeof h);
        return widen(h);
    }
    vf v;
    memcpy(&v, (const float *)p + i, sizeof v);
    return v;
}
INLINE void store(void *p, int64_t i, vf v, int bf16) {
    if (bf16) {
        vh h = narrow(v);
        memcpy((uint16_t *)p + i, &h, sizeof h);
    } else {
        memcpy((float *)p + i, &v, sizeof v);
    }
}

/* The same where only the first n < VW exist; the others read as zero. */
INLINE vf load_n(const void *p, int64_t i, int n, int bf16) {
    if (bf16) {
        uint16_t h[VW] = {0};
        for (int j = 0; j < n; j++) h[j] = ((const uint16_t *)p + i)[j];
        return load(h, 0, 1);
    }
    float f[VW] = {0};
    for (int j = 0; j < n; j++) f[j] = ((const float *)p + i)[j];
    return load(f, 0, 0);
}
INLINE void store_n(void *p, int64_t i, vf v, int n, int bf16) {
    if (bf16) {
        vh h = narrow(v);
        memcpy((uint16_t *)p + i, &h, 2 * (size_t)n);
    } else {
        memcpy((float *)p + i, &v, 4 * (size_t)n);
    }
}
INLINE vf load_at(const void *p, int64_t i, int64_t size, int bf16) {
    return i + VW <= size ? load(p, i, bf16) : load_n(p, i, (int)(size - i), bf16);
}
INLINE void store_at(void *p, int64_t i, int64_t size, vf v, int bf16) {
    if (i + VW <= size) store(p, i, v, bf16);
    else store_n(p, i, v, (int)(size - i), bf16);
}

/* The nearest integers, to even; |v| < 2^22. */
INLINE vi rounded(vf v) {
#if VW == 16
    return (vi)_mm512_cvtps_epi32((__m512)v);
#else
    return __builtin_convertvector((v + 12582912.0f) - 12582912.0f, vi);
#endif
}
/* The low bytes of the first n. */
INLINE void store_bytes(uint8_t *to, vi v, int n) {
#if VW == 16
    if (n == VW) {
        _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)v));
        return;
    }
#endif
    for (int j = 0; j < n; j++) to[j] = (uint8_t)v[j];
}

/* e^x to about 1e-7 for -87.3 <= x <= 88.3: Cephes' polynomial on |r| <= ln(2) / 2. */
INLINE vf exp_within(vf x) {
    vf n = fused(x, splat(1.44269504f), splat(12582912.0f)); /* 1.5 * 2^23 rounds to an integer */
    n = n - 12582912.0f;
    vf r = fused(n, splat(-0.693359375f), x);
    r = fused(n, splat(2.12194440e-4f), r);
    vf p = fused(r, splat(1.9875691500e-4f), splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    p = fused(p, r * r, r) + 1.0f;
    return p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}
#define EXP_LOW (-87.3f)
#define EXP_HIGH 88.3f

/* e^x for x <= 0; below EXP_LOW exactly zero, so e^-infinity is. A NaN stays one. */
INLINE vf exp_negative(vf x) {
    vi low = x < EXP_LOW;
    return blend(low, splat(0.0f), exp_within(blend(low, splat(EXP_LOW), x)));
}

/* v / (1 + e^-v), rounded. Beyond the clamp it is v or 0 to the last bit that counts; v carries a
 * NaN on. */
INLINE vf silu(vf v, int bf16) {
    vf power = exp_within(vmin(vmax(-v, splat(EXP_LOW)), splat(EXP_HIGH)));
    return round_to(v / (power + 1.0f), bf16);
}

#endif
