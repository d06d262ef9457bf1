/* Recurrences and convolutions on one token of each row: a state is read and written once.
 *
 * A chunk is one head of one row, or some of its channels: its numbers depend on no other. */
#include "states.h"

#include <math.h>
#include <string.h>

#include "pool.h"
#include "vec.h"

enum {
    CHANNELS_OF_CHUNK = 512,
    BLOCK = 4, /* vectors of a state's row at a time, which stay in the nearest cache */
};

TM_INLINE float sum16(__m512 v) { return _mm512_reduce_add_ps(v); }

/* v * sigmoid(v) */
TM_INLINE __m512 silu16(__m512 v) {
    __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), v));
    return _mm512_div_ps(v, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

/* As torch has it: the identity above 20. */
static float softplus(float v) { return v > 20.0f ? v : log1pf(expf(v)); }

static float within(float v, float least, float most) {
    v = v < least ? least : v;
    return v > most ? most : v;
}

/* What one head makes of its token: keys and queries, before and after they have decayed. */
struct delta_head {
    _Alignas(64) float key[MAX_KEY], query[MAX_KEY];
    _Alignas(64) float decay[MAX_KEY], late_key[MAX_KEY], late_query[MAX_KEY];
    float met; /* query . key */
};

/* x[0] to x[dim], filled up with zeros, times factor and, if they are to be normed, over their length. */
static void length_one(float *x, long dim, int is_normed, float factor) {
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; is_normed && i < dim; i += 16) {
        __m512 v = _mm512_load_ps(x + i);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    if (is_normed) factor /= sqrtf(sum16(squares) + 1e-6f);
    for (long i = 0; i < dim; i += 16)
        _mm512_store_ps(x + i, _mm512_mul_ps(_mm512_load_ps(x + i), _mm512_set1_ps(factor)));
}

static void decay_of(const struct tm_delta *op, struct delta_head *head, long gate) {
    for (long i = 0; i < op->key_dim; i += 16) {
        __mmask16 m = lanes(op->key_dim - i);
        __m512 g = op->has_channels ? load_some_f32(op->g + gate * op->key_dim + i, m)
                                    : _mm512_set1_ps(op->g[gate]);
        _mm512_store_ps(head->decay + i, exp16(g));
    }
}

/* The decayed keys and queries, and what the query finds of the key. */
static void meet(struct delta_head *head, long dim) {
    __m512 met = _mm512_setzero_ps();
    for (long i = 0; i < dim; i += 16) {
        __m512 k = _mm512_load_ps(head->key + i), q = _mm512_load_ps(head->query + i);
        __m512 decay = _mm512_load_ps(head->decay + i);
        _mm512_store_ps(head->late_key + i, _mm512_mul_ps(k, decay));
        _mm512_store_ps(head->late_query + i, _mm512_mul_ps(q, decay));
        met = _mm512_fmadd_ps(q, k, met);
    }
    head->met = sum16(met);
}

#include "typed.h"
#include "states.inc"
#define TM_BF16
#include "typed.h"
#include "states.inc"

void tm_delta_step(const struct tm_delta *op) {
    tm_parallel(op->is_bf16 ? delta_chunk_bf16 : delta_chunk_f32, (void *)op, op->rows * op->heads);
}

void tm_scan_step(const struct tm_scan *op) {
    tm_parallel(op->is_bf16 ? scan_chunk_bf16 : scan_chunk_f32, (void *)op, op->rows * op->heads);
}

void tm_conv_step(const struct tm_conv *op) {
    long chunks = (op->channels + CHANNELS_OF_CHUNK - 1) / CHANNELS_OF_CHUNK;
    tm_parallel(op->is_bf16 ? conv_chunk_bf16 : conv_chunk_f32, (void *)op, op->rows * chunks);
}
