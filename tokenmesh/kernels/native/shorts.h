/* linear on float32 with products of 16-bit integers: see shorts.c for the layout and the error. */
#ifndef TM_SHORTS_H
#define TM_SHORTS_H

#include <stdint.h>

enum { SHORTS_BLOCK = 64, SHORTS_MOST = (1 << 13) - 1 };

struct tm_shorts {
    const int16_t *panels; /* [ceil(outputs / 32)][columns / 2][32][2] */
    const float *scales;   /* [ceil(outputs / 32) * 32] */
    const float *bias;     /* [outputs] or NULL */
    int64_t outputs, inputs;
    int64_t columns; /* inputs, filled up with zeros to whole blocks */
};

/* x [M, inputs] with rows ldx elements apart -> out [M, outputs] without gaps. */
void tm_shorts_linear(const struct tm_shorts *weight, const float *x, long ldx, float *out, long M,
                      int has_gelu);

#endif
