/* Experts: pairs are sorted by expert, so that each weight that is needed is read once a step.
 *
 * Four pieces of parallel work: x by place, w13 with the activation, w2 with the routing weight, and
 * the sum over a token's pairs in their order. Each number depends on its own token alone.
 *
 * Weights that are codes are multiplied by quantized.c, one expert after the other.
 */
#include "experts.h"

#include <string.h>

#include "activations.h"
#include "pool.h"
#include "vec.h"

enum {
    CHUNKS_OF_THREAD = 8,
    ROWS_OF_CHUNK = 16,
    HITS_OF_THREAD = 2,
};

struct work {
    const struct tm_experts *layer;
    int64_t places, hits; /* pairs and experts that are here */
    int64_t units, parts; /* of an expert: tiles across, and the chunks that they are divided into */
};

TM_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Counting sort of the pairs by expert. 1: an id is out of range. */
static int sort(const struct tm_experts *layer, struct work *work) {
    int64_t *first = layer->first, total = layer->tokens * layer->top_k, place = 0;
    memset(first, 0, (size_t)(layer->experts + 1) * sizeof *first);
    for (int64_t pair = 0; pair < total; pair++) {
        int64_t expert = layer->ids[pair];
        if (expert < -1 || expert > layer->experts) return 1;
        if (expert >= 0 && expert < layer->experts) first[expert]++;
    }
    work->hits = 0;
    for (int64_t expert = 0; expert < layer->experts; expert++) {
        int64_t count = first[expert];
        if (count > 0) layer->hits[work->hits++] = expert;
        first[expert] = place;
        place += count;
    }
    work->places = place;
    for (int64_t pair = 0; pair < total; pair++) {
        int64_t expert = layer->ids[pair];
        if (expert >= 0 && expert < layer->experts) layer->pairs[first[expert]++] = pair;
    }
    /* each entry is now where the next expert begins */
    memmove(first + 1, first, (size_t)layer->experts * sizeof *first);
    first[0] = 0;
    return 0;
}

TM_INLINE __m512 activate(const struct tm_experts *layer, __m512 x) {
    __m512 positive;
    switch (layer->activation) {
    case TM_GELU: return gelu16(x);
    case TM_GELU_TANH: return gelu_tanh16(x);
    case TM_RELU:
    case TM_RELU2:
        /* of two operands the maximum is the second when either is NaN */
        positive = _mm512_max_ps(_mm512_setzero_ps(), x);
        return layer->activation == TM_RELU ? positive : _mm512_mul_ps(positive, positive);
    default: return times_sigmoid(x, _mm512_mul_ps(_mm512_set1_ps(layer->alpha), x));
    }
}

TM_INLINE __m512 gated(const struct tm_experts *layer, __m512 gate, __m512 up) {
    __m512 limit = _mm512_set1_ps(layer->limit), floor = _mm512_set1_ps(-layer->limit);
    up = _mm512_min_ps(limit, _mm512_max_ps(floor, up));
    if (layer->limits_activated_gate)
        gate = _mm512_min_ps(limit, activate(layer, gate));
    else
        gate = activate(layer, _mm512_min_ps(limit, gate));
    return _mm512_mul_ps(gate, _mm512_add_ps(up, _mm512_set1_ps(layer->up_offset)));
}

/* Divide what all experts that are hit have to do; units: tiles across of one expert. */
static int64_t divide(struct work *work, int64_t units) {
    int64_t threads = tm_pool_threads();
    int64_t parts = threads == 1 ? 1 : threads * CHUNKS_OF_THREAD / work->hits;
    work->units = units;
    work->parts = least(parts < 1 ? 1 : parts, units);
    return work->hits * work->parts;
}

/* Products of all places with their expert's codes. */
struct coded {
    const struct work *work;
    const struct tm_quantized *const *codes; /* of the first expert */
    int64_t step;                            /* from an expert's codes to the next */
    const void *inputs;                      /* T [places, inputs] */
    float *sums;                             /* [places, outputs] */
};

static void multiply_coded(void *argument, long hit) {
    const struct coded *coded = argument;
    const struct tm_experts *layer = coded->work->layer;
    const int64_t expert = layer->hits[hit], place = layer->first[expert];
    const struct tm_quantized *own = coded->codes[expert * coded->step];
    const int64_t size = layer->is_bf16 ? sizeof(bf16) : sizeof(float);
    tm_quantized_linear(own, (const char *)coded->inputs + place * own->inputs * size, own->inputs,
                        coded->sums + place * own->outputs, 1, layer->first[expert + 1] - place,
                        (int)layer->is_bf16);
}

/* Threads share the experts where there are enough of them, else each expert's outputs. */
static void multiply_codes(struct coded coded) {
    const int64_t hits = coded.work->hits;
    if (hits >= (int64_t)HITS_OF_THREAD * tm_pool_threads()) {
        tm_parallel(multiply_coded, &coded, hits);
        return;
    }
    for (int64_t hit = 0; hit < hits; hit++) multiply_coded(&coded, hit);
}

int64_t tm_experts_sums(const struct tm_experts *layer) {
    const int64_t inner = layer->codes13 ? layer->inner * (1 + layer->is_gated) : 0;
    return layer->codes2 && layer->hidden > inner ? layer->hidden : inner;
}

#include "typed.h"
#include "tile.inc"
#include "experts.inc"
#define TM_BF16
#include "typed.h"
#include "tile.inc"
#include "experts.inc"

int tm_experts_run(const struct tm_experts *layer) {
    return layer->is_bf16 ? run_experts_bf16(layer) : run_experts_f32(layer);
}
