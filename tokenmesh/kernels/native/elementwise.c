/* Operations of programs as calls of their own. x and out: rows without gaps. */
#include "program.h"

/* One operation from a buffer `from` numbers wide to one `to` wide. */
static void run(struct tm_op op, void *x, long from, void *out, long to, long rows, int is_bf16) {
    void *buffers[] = {x, out};
    const int64_t widths[] = {from, to};
    const struct tm_model model = {.is_bf16 = is_bf16};
    const struct tm_step step = {.tokens = rows, .buffers = buffers, .widths = widths};
    op.source = 0;
    op.target = 1;
    tm_run(&model, &op, 1, &step);
}

/* RMS norms of x [rows, width] into out, see normalize in elementwise.inc. */
void tm_norm(void *x, const float *weight, void *out, long rows, long width, float eps, int is_bf16) {
    const struct tm_op op = {.kind = TM_NORM, .width = width, .value = eps, .weight = weight};
    run(op, x, width, out, width, rows, is_bf16);
}

/* x [rows, 2 * width] to out [rows, width]. */
void tm_silu_mul(void *x, void *out, long rows, long width, int is_bf16) {
    const struct tm_op op = {.kind = TM_SILU_MUL, .width = width};
    run(op, x, 2 * width, out, width, rows, is_bf16);
}
