/* A layer's router and its experts; routed.py writes the same struct with ctypes. */
#ifndef TM_ROUTED_H
#define TM_ROUTED_H

#include <stdint.h>

#include "experts.h"

enum tm_scores { TM_SOFTMAX, TM_SIGMOID };

struct tm_routed {
    const void *weight;      /* panels of the experts' logits: bfloat16 or float32, see router_is_bf16 */
    const void *bias;        /* of the same type, [experts], or NULL */
    const float *correction; /* [experts] added to the scores that the choice is made by, or NULL */
    int64_t router_is_bf16;  /* then logits are rounded to bfloat16; x must be in it too */
    int64_t scores;          /* enum tm_scores */
    int64_t is_normalized;   /* the weights of a token add up to `scale` */
    float scale;
    struct tm_experts layer; /* what lasts: no tokens, x, ids, weights, out or scratch */
};

/* Bytes that tm_routed_run needs beside its arguments. */
int64_t tm_routed_scratch(const struct tm_routed *routed, int64_t tokens);

/* x and out [tokens, hidden] in the experts' type, out may be x; scratch is aligned to 64 bytes. */
void tm_routed_run(const struct tm_routed *routed, const void *x, void *out, int64_t tokens,
                   void *scratch);

#endif
