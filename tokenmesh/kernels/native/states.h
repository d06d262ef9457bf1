/* One token of each row through a mixer with a state; states.py writes the same structs with ctypes.
 *
 * Rows of x, q, k, v, B, C and z are contiguous in their last dimension. A row's token and slot are
 * numbers of the tensors' first dimension. */
#ifndef TM_STATES_H
#define TM_STATES_H

#include <stdint.h>

enum { MAX_KEY = 256, MAX_KEPT = 8 }; /* key channels of a head; inputs and weights of a channel */

/* See kernels/gated_delta. */
struct tm_delta {
    const void *q, *k, *v;
    const float *g, *beta; /* contiguous */
    float *state;          /* [slots, heads, key_dim, value_dim] */
    void *out;             /* [tokens, heads, value_dim] */
    const int64_t *tokens, *slots;
    int64_t rows, is_bf16, key_heads, heads, key_dim, value_dim, has_channels, is_normed;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head; /* strides */
    float scale;
};

/* See kernels/mamba2. */
struct tm_scan {
    const void *x, *B, *C, *z;                 /* z or NULL */
    const float *dt, *rate, *D, *dt_bias;      /* contiguous; D, dt_bias or NULL */
    float *state;                              /* [slots, heads, dim, size] */
    void *out;                                 /* [tokens, heads, dim] */
    const int64_t *tokens, *slots;
    int64_t rows, is_bf16, heads, groups, dim, size;
    int64_t x_token, x_head, B_token, B_group, C_token, C_group, z_token, z_head; /* strides */
    float dt_least, dt_most;
};

/* See kernels/causal_conv. */
struct tm_conv {
    const void *x, *weight, *bias; /* weight [channels, width]; bias or NULL */
    void *state;                   /* [slots, channels, kept] */
    void *out;                     /* [tokens, channels] */
    const int64_t *tokens, *slots;
    int64_t rows, is_bf16, channels, width, kept, x_token, is_silu;
};

void tm_delta_step(const struct tm_delta *op);
void tm_scan_step(const struct tm_scan *op);
void tm_conv_step(const struct tm_conv *op);

#endif
