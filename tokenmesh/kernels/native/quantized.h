/* linear on a quantized weight, which stays in its format: see quantized.c for the layout. */
#ifndef TM_QUANTIZED_H
#define TM_QUANTIZED_H

#include <stdint.h>

enum tm_codes { TM_INTEGERS, TM_TABLE, TM_E4M3 };
enum tm_activations { TM_FLOATS, TM_INT8, TM_BFLOAT16 };

/* weight[o][i] = channel[o] * (scale[o][i / group] * number(code[o][i]) + offset[o][i / group]) */
struct tm_quantized {
    const uint8_t *codes;  /* panels, see quantized.c */
    const void *scales;    /* [panels][groups][32] or NULL: 1 */
    const void *offsets;   /* the same or NULL: 0 */
    const float *channel;  /* [panels][32] */
    const float *bias;     /* [outputs] or NULL */
    const int32_t *order;  /* [inputs]: the input of x that a column multiplies; NULL: its own */
    int64_t outputs, inputs;
    int64_t block;         /* columns that share an activation's scale: 16, 32 or 64 */
    int64_t blocks;        /* of all columns, filled up with codes that x has zeros for */
    int64_t groups, group_blocks; /* groups of columns, blocks of a group */
    int64_t bits;          /* of a code: 4, 5, 6 or 8 */
    int64_t kind;          /* enum tm_codes */
    int64_t center;        /* INTEGERS: number = code - center; TABLE: table[code] - center */
    int64_t scales_are_half;   /* scales and offsets are float16, else float32 */
    int64_t activations;   /* enum tm_activations: what x becomes, int8 with a scale by block;
                            * TM_BFLOAT16 with TM_E4M3 only */
    uint8_t table[16];
};

/* Rows of the decoded weight: index [count] -> out [count, inputs], float32 or bfloat16. 1 when an index
 * is not an output's. */
int tm_quantized_rows(const struct tm_quantized *weight, const int64_t *index, long count, void *out,
                      int is_bf16);

/* Whether TM_BFLOAT16 is there. */
int tm_has_e4m3(void);

/* x [M, inputs] with rows ldx elements apart, out [M, outputs] in x's type or in float32. */
void tm_quantized_linear(const struct tm_quantized *weight, const void *x, long ldx, void *out,
                         int out_is_float, long M, int is_bf16);

#endif
