/* The noise behind every draw: see kernels/exponential_noise. */
#ifndef TM_NOISE_H
#define TM_NOISE_H

#include <stdint.h>

/* out [rows, tokens], float, or int32 for the 31 bits behind the numbers. `ids` [rows, tokens] are
 * the tokens; NULL for tokens 0 to tokens - 1. */
void tm_noise(const int64_t *seeds, const int64_t *positions, const int64_t *ids, void *out,
              long rows, long tokens, int is_bits);

#endif
