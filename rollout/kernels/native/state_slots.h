/* The slots of recurrent states that the sequences of a step have. */
#ifndef ROLLOUT_STATE_SLOTS_H
#define ROLLOUT_STATE_SLOTS_H

#include <stdint.h>

/* Whether a sequence has none: captured steps of a GPU are padded with such, no step on a CPU is. */
static inline int32_t has_padding(const int32_t *slots, int64_t sequences) {
    for (int64_t s = 0; s < sequences; s++)
        if (slots[s] < 0) return 1;
    return 0;
}

#endif
