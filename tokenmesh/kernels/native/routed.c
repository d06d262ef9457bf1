/* Routing and experts of one layer: the router's product, each token's choice, then experts.c.
 *
 * Each token's choice depends on its own logits alone. Of equal scores the lowest number is chosen.
 */
#include "routed.h"

#include <math.h>
#include <string.h>

#include "gemm.h"
#include "pool.h"
#include "vec.h"

enum {
    PAIRS_AT_ONCE = 4096, /* bounds the memory between the two products of experts */
    TOKENS_OF_CHUNK = 16,
    ALIGNMENT = 64,
};

/* Where the parts of the scratch are, for up to `most` tokens at a time. */
struct room {
    int64_t most;
    float *scores;   /* [most, experts] */
    float *order;    /* [most, experts] what the choice is made by; first the logits */
    uint8_t *taken;  /* [most, experts] */
    int64_t *ids;    /* [most, top_k] */
    float *weights;  /* [most, top_k] */
    float *wide;     /* [most, hidden] x in float32, for a router in float32 */
    int64_t *first, *hits, *pairs; /* of tm_experts, like the following */
    void *rows, *activated;
    float *parts, *sums;
};

struct job {
    const struct tm_routed *routed;
    const struct room *room;
    const void *x;
    int64_t tokens;
};

static void *take(intptr_t *next, int64_t bytes) {
    void *taken = (void *)*next;
    *next += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return taken;
}

static int is_widened(const struct tm_routed *routed) {
    return routed->layer.is_bf16 && !routed->router_is_bf16;
}

/* The scratch at address `next`, divided; returns its end. */
static intptr_t divide(const struct tm_routed *routed, int64_t tokens, intptr_t next,
                       struct room *room) {
    const struct tm_experts *layer = &routed->layer;
    int64_t most = PAIRS_AT_ONCE / layer->top_k;
    if (most < 1) most = 1;
    if (most > tokens) most = tokens;
    const int64_t experts = layer->experts, pairs = most * layer->top_k;
    const int64_t size = layer->is_bf16 ? sizeof(bf16) : sizeof(float);
    room->most = most;
    room->scores = take(&next, most * experts * (int64_t)sizeof(float));
    room->order = take(&next, most * experts * (int64_t)sizeof(float));
    room->taken = take(&next, most * experts);
    room->ids = take(&next, pairs * (int64_t)sizeof(int64_t));
    room->weights = take(&next, pairs * (int64_t)sizeof(float));
    room->wide = take(&next, is_widened(routed) ? most * layer->hidden * (int64_t)sizeof(float) : 0);
    room->first = take(&next, (experts + 1) * (int64_t)sizeof(int64_t));
    room->hits = take(&next, experts * (int64_t)sizeof(int64_t));
    room->pairs = take(&next, pairs * (int64_t)sizeof(int64_t));
    room->rows = take(&next, pairs * layer->hidden * size);
    room->activated = take(&next, pairs * layer->inner * size);
    room->parts = take(&next, pairs * layer->hidden * (int64_t)sizeof(float));
    room->sums = take(&next, pairs * tm_experts_sums(layer) * (int64_t)sizeof(float));
    return next;
}

int64_t tm_routed_scratch(const struct tm_routed *routed, int64_t tokens) {
    struct room room;
    return divide(routed, tokens, 0, &room);
}

static float sum_of(const float *x, int64_t count) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; i++) sum += x[i];
    return sum;
}

/* out = softmax(x) */
static void softmax(const float *x, float *out, int64_t count) {
    float top = -INFINITY;
    for (int64_t i = 0; i < count; i++)
        if (x[i] > top) top = x[i];
    for (int64_t i = 0; i < count; i += 16) {
        __mmask16 mask = lanes(count - i);
        __m512 v = _mm512_sub_ps(load_some_f32(x + i, mask), _mm512_set1_ps(top));
        store_some_f32(out + i, mask, exp16(v));
    }
    float sum = sum_of(out, count);
    for (int64_t i = 0; i < count; i++) out[i] /= sum;
}

static void sigmoid(const float *x, float *out, int64_t count) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t i = 0; i < count; i += 16) {
        __mmask16 mask = lanes(count - i);
        __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), load_some_f32(x + i, mask)));
        store_some_f32(out + i, mask, _mm512_div_ps(one, _mm512_add_ps(one, e)));
    }
}

static void choose(const float *order, uint8_t *taken, int64_t experts, int64_t *ids, int64_t top_k) {
    memset(taken, 0, (size_t)experts);
    for (int64_t i = 0; i < top_k; i++) {
        int64_t best = -1;
        for (int64_t expert = 0; expert < experts; expert++)
            if (!taken[expert] && (best < 0 || order[expert] > order[best])) best = expert;
        taken[best] = 1;
        ids[i] = best;
    }
}

/* From a token's logits, in `order`, to its experts and their weights. */
static void route(const struct tm_routed *routed, float *order, float *scores, uint8_t *taken,
                  int64_t *ids, float *weights) {
    const int64_t experts = routed->layer.experts, top_k = routed->layer.top_k;
    if (routed->router_is_bf16)
        for (int64_t i = 0; i < experts; i += 16) {
            __mmask16 mask = lanes(experts - i);
            store_some_f32(order + i, mask, widen(narrow(load_some_f32(order + i, mask))));
        }
    if (routed->scores == TM_SOFTMAX)
        softmax(order, scores, experts);
    else
        sigmoid(order, scores, experts);
    for (int64_t i = 0; i < experts; i++)
        order[i] = routed->correction ? scores[i] + routed->correction[i] : scores[i];
    choose(order, taken, experts, ids, top_k);
    for (int64_t i = 0; i < top_k; i++) weights[i] = scores[ids[i]];
    float sum = routed->is_normalized ? sum_of(weights, top_k) + 1e-20f : 1.0f;
    for (int64_t i = 0; i < top_k; i++) weights[i] = weights[i] / sum * routed->scale;
}

static void route_some(void *argument, long chunk) {
    const struct job *job = argument;
    const struct room *room = job->room;
    const int64_t experts = job->routed->layer.experts, top_k = job->routed->layer.top_k;
    int64_t token = chunk * TOKENS_OF_CHUNK, end = token + TOKENS_OF_CHUNK;
    if (end > job->tokens) end = job->tokens;
    for (; token < end; token++)
        route(job->routed, room->order + token * experts, room->scores + token * experts,
              room->taken + token * experts, room->ids + token * top_k, room->weights + token * top_k);
}

static void widen_some(void *argument, long chunk) {
    const struct job *job = argument;
    const int64_t hidden = job->routed->layer.hidden;
    int64_t token = chunk * TOKENS_OF_CHUNK, end = token + TOKENS_OF_CHUNK;
    if (end > job->tokens) end = job->tokens;
    for (int64_t i = token * hidden; i < end * hidden; i += 16) {
        __mmask16 mask = lanes(end * hidden - i);
        store_some_f32(job->room->wide + i, mask, load_some_bf16((const bf16 *)job->x + i, mask));
    }
}

static void run_some(const struct tm_routed *routed, const struct room *room, const void *x,
                     void *out, int64_t tokens) {
    struct job job = {routed, room, x, tokens};
    struct tm_experts layer = routed->layer;
    const long chunks = (tokens + TOKENS_OF_CHUNK - 1) / TOKENS_OF_CHUNK;
    const void *given = x;
    if (is_widened(routed)) {
        tm_parallel(widen_some, &job, chunks);
        given = room->wide;
    }
    tm_linear(given, layer.hidden, routed->weight, routed->bias, room->order, 1, tokens, layer.experts,
              layer.hidden, (int)routed->router_is_bf16);
    tm_parallel(route_some, &job, chunks);
    layer.tokens = tokens;
    layer.x = x;
    layer.out = out;
    layer.ids = room->ids;
    layer.weights = room->weights;
    layer.first = room->first;
    layer.hits = room->hits;
    layer.pairs = room->pairs;
    layer.rows = room->rows;
    layer.activated = room->activated;
    layer.parts = room->parts;
    layer.sums = room->sums;
    tm_experts_run(&layer); /* cannot fail: every id is an expert's */
}

void tm_routed_run(const struct tm_routed *routed, const void *x, void *out, int64_t tokens,
                   void *scratch) {
    struct room room;
    divide(routed, tokens, (intptr_t)scratch, &room);
    const int64_t row = routed->layer.hidden * (routed->layer.is_bf16 ? sizeof(bf16) : sizeof(float));
    for (int64_t token = 0; token < tokens; token += room.most) {
        int64_t count = tokens - token < room.most ? tokens - token : room.most;
        run_some(routed, &room, (const char *)x + token * row, (char *)out + token * row, count);
    }
}
