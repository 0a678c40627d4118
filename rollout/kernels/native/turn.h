/* Squares of 32-bit words turned in registers. */
#ifndef ROLLOUT_TURN_H
#define ROLLOUT_TURN_H

#include "vec.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SIDE 16 /* rows of a tile, and words that are turned at a time */

#if VW == 16
/* Lane k of vector i becomes lane i of vector k. */
INLINE void turn_words(__m512i a[SIDE]) {
    __m512i b[SIDE];
    for (int i = 0; i < SIDE; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < SIDE; i += 4) { /* a[i + j], lane n: column 4n + j of rows i .. i + 3 */
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int j = 0; j < 4; j++) { /* even lanes of four such, then odd ones */
        __m512i x = _mm512_shuffle_i32x4(a[j], a[j + 4], 0x88);
        __m512i y = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0x88);
        b[j] = _mm512_shuffle_i32x4(x, y, 0x88);
        b[j + 8] = _mm512_shuffle_i32x4(x, y, 0xdd);
        x = _mm512_shuffle_i32x4(a[j], a[j + 4], 0xdd);
        y = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0xdd);
        b[j + 4] = _mm512_shuffle_i32x4(x, y, 0x88);
        b[j + 12] = _mm512_shuffle_i32x4(x, y, 0xdd);
    }
    for (int k = 0; k < SIDE; k++) a[k] = b[k];
}
#endif

#endif
