/* The experts of a mixture-of-experts layer; experts.py writes the same struct with ctypes. */
#ifndef TM_EXPERTS_H
#define TM_EXPERTS_H

#include <stdint.h>

#include "quantized.h"

enum tm_activation { TM_SILU, TM_GELU, TM_GELU_TANH, TM_RELU, TM_RELU2 };

/* P = tokens * top_k pairs of a token and an expert. T is bfloat16 (hidden and inner even) or
 * float32. Weights are in panels of 32 outputs as in gemm.inc, one expert after the other, or each is
 * a struct of codes. S is 2 with a gate, else 1. */
struct tm_experts {
    const void *x;        /* T [tokens, hidden] */
    const int64_t *ids;   /* [tokens, top_k]; -1 and experts: no expert here */
    const float *weights; /* [tokens, top_k] */
    const void *w13;      /* T, panels of inner or, gated, panels of gate and up by turns */
    const void *b13;      /* T [experts, inner or, gated, 2 * inner: gate first] or NULL */
    const void *w2;       /* T, panels of hidden */
    const void *b2;       /* T [experts, hidden] or NULL */
    const struct tm_quantized *const *codes13; /* [experts * S], gate before up, or NULL: w13 */
    const struct tm_quantized *const *codes2;  /* [experts], or NULL: w2 */
    void *out;            /* T [tokens, hidden] */
    int64_t *first;       /* scratch [experts + 1]: the first place of each expert's pairs */
    int64_t *hits;        /* scratch [experts]: experts with pairs */
    int64_t *pairs;       /* scratch [P]: which pair is at a place */
    void *rows;           /* scratch T [P, hidden]: x by place */
    void *activated;      /* scratch T [P, inner] by place */
    float *parts;         /* scratch [P, hidden] by pair */
    float *sums;          /* scratch [P, tm_experts_sums()]: products with codes, by place */
    int64_t tokens, top_k, experts, hidden, inner, is_bf16, is_gated, activation;
    int64_t limits_activated_gate;
    float alpha, limit, up_offset; /* limit: infinity without */
};

/* 0, or 1 when an id is neither an expert's nor one of those that mean none; out is then unwritten. */
int tm_experts_run(const struct tm_experts *layer);

/* Floats of `sums` for each pair; 0 without codes. */
int64_t tm_experts_sums(const struct tm_experts *layer);

#endif
