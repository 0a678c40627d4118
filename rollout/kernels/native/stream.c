/* Copies that go past the caches: what is written here is far more than they hold, and is read
 * again when they have long been used for something else. A plain store would fetch each line from
 * memory first. See rollout/kernels/nontemporal_copy and copy_into_box. */
#include "vec.h"

#include "turn.h"

#define LINE 64
#define CHUNK (1 << 18) /* bytes that a thread takes at a time */

typedef uint32_t pair; /* two inputs of one output, 16 bits each */

/* One aligned line from anywhere. */
INLINE void put_line(void *to, const void *from) {
#if VW == 16
    _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
#elif defined(__x86_64__)
    for (int i = 0; i < LINE / 16; i++)
        _mm_stream_si128((__m128i *)to + i, _mm_loadu_si128((const __m128i *)from + i));
#else
    memcpy(to, from, LINE);
#endif
}

/* Streamed lines are in no order with other stores until this. */
INLINE void settle(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

static void stream(uint8_t *to, const uint8_t *from, int64_t size) {
    int64_t head = -(intptr_t)to & (LINE - 1);
    if (head > size) head = size;
    memcpy(to, from, head);
    int64_t at = head;
    for (; at + LINE <= size; at += LINE) put_line(to + at, from + at);
    memcpy(to + at, from + at, size - at);
}

/* `rows` stretches of `size` bytes; strides in bytes. */
EXPORT void rollout_nontemporal_copy(uint8_t *to, int64_t to_stride, const uint8_t *from,
                                int64_t from_stride, int64_t rows, int64_t size, int threads) {
    int64_t parts = (size + CHUNK - 1) / CHUNK;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * parts; i++) {
            int64_t row = i / parts, start = i % parts * CHUNK;
            int64_t left = size - start < CHUNK ? size - start : CHUNK;
            stream(to + row * to_stride + start, from + row * from_stride + start, left);
        }
        settle();
    }
}

#if VW == 16
/* SIDE x SIDE pairs turned: column k of `from` becomes line k of `to`. */
INLINE void turn(pair *to, const pair *from, int64_t stride) {
    __m512i lines[SIDE];
    for (int i = 0; i < SIDE; i++) lines[i] = _mm512_loadu_si512(from + i * stride);
    turn_words(lines);
    for (int k = 0; k < SIDE; k++) _mm512_stream_si512((__m512i *)(to + k * SIDE), lines[k]);
}
#else
INLINE void turn(pair *to, const pair *from, int64_t stride) {
    pair lines[SIDE * SIDE];
    for (int i = 0; i < SIDE; i++) {
        pair row[SIDE];
        memcpy(row, from + i * stride, sizeof row);
        for (int k = 0; k < SIDE; k++) lines[k * SIDE + i] = row[k];
    }
    for (int k = 0; k < SIDE; k++) put_line(to + k * SIDE, lines + k * SIDE);
}
#endif

/* Rows of 16-bit values into tiles of 16 rows by pairs (TileLayout): `blocks` of 16 rows of `pairs`
 * pairs each. Strides in pairs: of a row of `from`, and of a block of `to`, which is aligned. */
EXPORT void rollout_write_tiles(pair *to, int64_t to_stride, const pair *from, int64_t from_stride,
                                int64_t blocks, int64_t pairs, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            pair *out = to + b * to_stride;
            const pair *in = from + b * SIDE * from_stride;
            int64_t k = 0;
            for (; k + SIDE <= pairs; k += SIDE) turn(out + k * SIDE, in + k, from_stride);
            for (; k < pairs; k++)
                for (int i = 0; i < SIDE; i++)
                    memcpy(out + k * SIDE + i, in + i * from_stride + k, sizeof(pair));
        }
        settle();
    }
}
