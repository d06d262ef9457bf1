/* What encoders compute besides linear layers: attention within rows, layer norms, GELU. */
#include "rows.h"

#include <math.h>
#include <stdlib.h>

#include "gelu.h"
#include "pool.h"
#include "vec.h"

enum { TOKENS_OF_CHUNK = 16, NUMBERS_OF_CHUNK = 1 << 14, FEW_NUMBERS = 4096 };

/* queries [8][dim] with all keys, panels of [dim][32], to scores [8][padded]. */
static void score_queries(const float *queries, const float *keys, long dim, long padded, float *scores) {
    for (long base = 0; base < padded; base += 32) {
        const float *panel = keys + base * dim;
        __m512 acc[8][2];
        _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
        for (long d = 0; d < dim; d++) {
            const __m512 low = _mm512_loadu_ps(panel + 32 * d), high = _mm512_loadu_ps(panel + 32 * d + 16);
            _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
                const __m512 q = _mm512_set1_ps(queries[i * dim + d]);
                acc[i][0] = _mm512_fmadd_ps(q, low, acc[i][0]);
                acc[i][1] = _mm512_fmadd_ps(q, high, acc[i][1]);
            }
        }
        _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
            _mm512_storeu_ps(scores + i * padded + base, acc[i][0]);
            _mm512_storeu_ps(scores + i * padded + base + 16, acc[i][1]);
        }
    }
}

/* The keys from `base` on that a query of a row sees. */
TM_INLINE __mmask16 seen(long base, long first, long end) {
    if (base >= end || base + 16 <= first) return 0;
    const __mmask16 mask = lanes(end - base);
    return base < first ? mask & (__mmask16)(0xffffu << (first - base)) : mask;
}

/* Scores become weights, 0 of what the query does not see; their sum. */
static float soften_row(float *scores, long query, long tokens, long padded, long window) {
    const long first = window >= 0 && query > window ? query - window : 0;
    const long end = window >= 0 && query + window + 1 < tokens ? query + window + 1 : tokens;
    __m512 top = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (long j = 0; j < padded; j += 16) {
        const __mmask16 m = seen(j, first, end);
        /* a NaN has to stay one: of two operands the maximum is the second when either is NaN */
        top = _mm512_mask_max_ps(top, m, top, _mm512_loadu_ps(scores + j));
    }
    const __m512 highest = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (long j = 0; j < padded; j += 16) {
        const __mmask16 m = seen(j, first, end);
        __m512 e = _mm512_maskz_mov_ps(m, exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + j), highest)));
        total = _mm512_add_ps(total, e);
        _mm512_storeu_ps(scores + j, e);
    }
    return _mm512_reduce_add_ps(total);
}

/* weights [8][padded] times 32 columns of values [tokens][wide]. */
static void mix_values(const float *weights, long padded, const float *values, long tokens, long wide,
                       __m512 mixed[8][2]) {
    __m512 acc[8][2];
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
    for (long j = 0; j < tokens; j++) {
        const __m512 low = _mm512_loadu_ps(values + j * wide), high = _mm512_loadu_ps(values + j * wide + 16);
        _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
            const __m512 w = _mm512_set1_ps(weights[i * padded + j]);
            acc[i][0] = _mm512_fmadd_ps(w, low, acc[i][0]);
            acc[i][1] = _mm512_fmadd_ps(w, high, acc[i][1]);
        }
    }
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
        mixed[i][0] = acc[i][0];
        mixed[i][1] = acc[i][1];
    }
}

#include "typed.h"
#include "rows.inc"
#define TM_BF16
#include "typed.h"
#include "rows.inc"

void tm_row_attention(const struct tm_rows *job, int is_bf16) {
    tm_parallel(is_bf16 ? attend_head_bf16 : attend_head_f32, (void *)job, job->rows * job->heads);
}

/* x, added and out: [tokens, width] without gaps; out may be one of them. weight, bias and added, which
 * is added to x first, may be NULL. */
void tm_layer_norm(const void *x, const void *added, const void *weight, const void *bias, void *out, long tokens, long width,
                   float eps, int is_bf16) {
    const long chunks = (tokens + TOKENS_OF_CHUNK - 1) / TOKENS_OF_CHUNK;
    if (is_bf16) {
        struct norms_bf16 job = {x, added, weight, bias, out, tokens, width, eps};
        tm_parallel(norm_tokens_bf16, &job, chunks);
    } else {
        struct norms_f32 job = {x, added, weight, bias, out, tokens, width, eps};
        tm_parallel(norm_tokens_f32, &job, chunks);
    }
}

/* out may be x. */
void tm_gelu(const void *x, void *out, long numbers, int is_bf16) {
    const long chunks = (numbers + NUMBERS_OF_CHUNK - 1) / NUMBERS_OF_CHUNK;
    if (is_bf16) {
        struct gelus_bf16 job = {x, out, numbers};
        tm_parallel(gelu_numbers_bf16, &job, chunks);
    } else {
        struct gelus_f32 job = {x, out, numbers};
        tm_parallel(gelu_numbers_f32, &job, chunks);
    }
}
