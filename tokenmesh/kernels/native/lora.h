/* Low-rank adapters of linear layers; lora/weights.py writes the same structs with ctypes. */
#ifndef TM_LORA_H
#define TM_LORA_H

#include <stdint.h>

enum { LORA_TOKENS = 4, LORA_MAX_RANK = 512 };

/* Adds (x @ a.T) @ b to outputs first ... first + outputs - 1. */
struct tm_lora_part {
    const void *a, *b; /* [rank, inputs], [rank, outputs] */
    int64_t rank, first, outputs;
};

/* What one adapter does to one layer. */
struct tm_lora_site {
    int64_t count;
    const struct tm_lora_part *parts;
};

/* Tokens in tiles of at most LORA_TOKENS that have the same adapter. */
struct tm_lora_rows {
    int64_t tiles;
    const int64_t *tokens;                    /* of the batch, tile by tile */
    const int64_t *firsts;                    /* [tiles + 1] where in `tokens` each tile begins */
    const struct tm_lora_site *const *sites;  /* [tiles] of the tile's adapter, one for each layer */
};

/* x [*, inputs] and out [*, outputs], rows ldx and ldo elements apart; out in x's type or, with
 * out_is_float, in float32. */
void tm_lora(const void *x, long ldx, void *out, long ldo, int out_is_float, long inputs, long number,
             const struct tm_lora_rows *rows, int is_bf16);

#endif
