/* An operation of programs as a call of its own. */
#include "program.h"

/* RMS norms of x [rows, width] into out, see normalize in elementwise.inc. */
void tm_norm(void *x, const float *weight, void *out, long rows, long width, float eps, int is_bf16) {
    void *buffers[] = {x, out};
    const int64_t widths[] = {width, width};
    const struct tm_model model = {.is_bf16 = is_bf16};
    const struct tm_step step = {.tokens = rows, .buffers = buffers, .widths = widths};
    const struct tm_op op = {.kind = TM_NORM, .source = 0, .target = 1, .width = width, .value = eps, .weight = weight};
    tm_run(&model, &op, 1, &step);
}
