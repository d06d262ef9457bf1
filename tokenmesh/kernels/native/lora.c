/* Low-rank adapters: see lora.h and lora.inc. */
#include "lora.h"

#include "pool.h"
#include "vec.h"

#include "typed.h"
#include "lora.inc"
#define TM_BF16
#include "typed.h"
#include "lora.inc"

void tm_lora(const void *x, long ldx, void *out, long ldo, int out_is_float, long inputs, long number,
             const struct tm_lora_rows *rows, int is_bf16) {
    if (is_bf16)
        lora_all_bf16(x, ldx, out, ldo, out_is_float, inputs, number, rows);
    else
        lora_all_f32(x, ldx, out, ldo, out_is_float, inputs, number, rows);
}
