/* What a thread does between two looks at what it waits for. */
#ifndef ROLLOUT_WAIT_H
#define ROLLOUT_WAIT_H

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
