/* Runs a program over the tokens of a step: one call a forward pass, so that Python's cost and its
 * lock are paid once instead of at each of some hundred operations. */
#include "program.h"

#include <limits.h>
#include <math.h>
#include <string.h>

#include "activations.h"
#include "amx.h"
#include "gemm.h"
#include "lora.h"
#include "pages.h"
#include "pool.h"
#include "quantized.h"
#include "routed.h"
#include "softmax.h"
#include "vec.h"

enum {
    TOKENS_OF_CHUNK_WORK = 1 << 14, /* numbers worth handing to another thread */
    QUERIES_AT_ONCE = 4,
    FEW_QUERIES = 2, /* for which values are not made float32 beforehand */
};

/* The block ids of a token's row, of the operation's KV group. */
static inline const int64_t *table_of(const struct tm_step *step, const struct tm_op *op, long token) {
    return step->tables[op->group] + step->rows[token] * step->columns;
}

/* The scale of a layer's keys (0) or values (1). */
static inline float page_scale(const struct tm_step *step, const struct tm_op *op, int plane) {
    return step->page_scales ? step->page_scales[2 * op->layer + plane] : 1.0f;
}

#include "typed.h"
#include "elementwise.inc"
#include "attention.inc"
#include "tokens.inc"
#define TM_BF16
#include "typed.h"
#include "elementwise.inc"
#include "attention.inc"
#include "attention_tiles.inc"
#include "tokens.inc"

void tm_run(const struct tm_model *model, const struct tm_op *ops, int64_t count,
            const struct tm_step *step) {
    for (int64_t i = 0; i < count; i++) {
        if (model->is_bf16)
            run_op_bf16(model, ops + i, step);
        else
            run_op_f32(model, ops + i, step);
    }
}
