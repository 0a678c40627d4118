/* Positions at which two runs of elements differ by their bits; see rollout/kernels/changed. */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define LINE 64 /* bytes compared before any element is looked at */

/* Elements i .. stop of T; falls out of the function when more than `most` differ. */
#define SCAN(T)                                                                                    \
    for (int64_t i = first; i < stop; i++) {                                                       \
        T x, y;                                                                                    \
        memcpy(&x, a + i * sizeof(T), sizeof(T));                                                  \
        memcpy(&y, b + i * sizeof(T), sizeof(T));                                                  \
        if (x != y) {                                                                              \
            if (count == most)                                                                     \
                return -1;                                                                         \
            out[count++] = i;                                                                      \
        }                                                                                          \
    }

static inline uint64_t word(const uint8_t *p) {
    uint64_t w;
    memcpy(&w, p, sizeof w);
    return w;
}

static inline int same_line(const uint8_t *a, const uint8_t *b) {
    uint64_t differs = 0;
    for (int i = 0; i < LINE; i += 8)
        differs |= word(a + i) ^ word(b + i);
    return !differs;
}

/* Returns how many differ, or -1 when more than `most` do; `out` has room for `most`. */
EXPORT int64_t rollout_changed(const uint8_t *a, const uint8_t *b, int64_t n, int32_t size,
                               int64_t most, int64_t *out) {
    int64_t count = 0, per_line = LINE / size;
    for (int64_t first = 0; first < n; first += per_line) {
        int64_t stop = first + per_line < n ? first + per_line : n;
        if (stop - first == per_line && same_line(a + first * size, b + first * size))
            continue;
        switch (size) {
        case 1: SCAN(uint8_t) break;
        case 2: SCAN(uint16_t) break;
        case 4: SCAN(uint32_t) break;
        default: SCAN(uint64_t) break;
        }
    }
    return count;
}
