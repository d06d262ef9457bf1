/* A forward pass as a list of operations; program.py writes the same structs with ctypes. */
#ifndef TM_PROGRAM_H
#define TM_PROGRAM_H

#include <stdint.h>

enum { TM_NORM, TM_LINEAR, TM_HEAD_NORM, TM_ROPE, TM_KV_WRITE, TM_ATTENTION, TM_SILU_MUL, TM_ADD, TM_SCALE,
       TM_GELU_MUL, TM_GELU_TANH_MUL, TM_EXPERTS, TM_TOKEN_GATE, TM_LORA, TM_QUANTIZED };

enum { MAX_DIM = 256, MAX_QUERIES = 32 }; /* head_dim; query heads of a kv head, times tokens */

/* One operation on every token of the step. Which fields count depends on `kind`. */
struct tm_op {
    int64_t kind;
    int64_t source, target; /* buffers */
    int64_t width;          /* numbers of a token that the operation covers; LINEAR: its inputs */
    int64_t outputs;        /* LINEAR */
    int64_t offset;         /* first number of the token that the operation reads */
    int64_t target_offset;  /* and the first that it writes, in operations without a matrix */
    int64_t index;          /* ROPE: which turns; KV_WRITE, ATTENTION: which slot of the pool;
                             * LORA: which layer of the adapters */
    int64_t group;          /* KV_WRITE, ATTENTION: whose tables */
    int64_t layer;          /* KV_WRITE, ATTENTION: whose scales */
    int64_t window;         /* ATTENTION: 0 without */
    float value;            /* NORM, HEAD_NORM: eps; ATTENTION: scale; ADD: factor */
    const void *weight;     /* ATTENTION: float [heads] sinks or NULL; EXPERTS: a struct tm_routed;
                             * QUANTIZED: a struct tm_quantized */
    const void *bias;
    float softcap;          /* ATTENTION: 0 without */
};

struct tm_attention {
    int64_t heads, kv_heads, head_dim, page_size, window;
    float scale;
    float softcap;      /* scores become softcap * tanh(score / softcap); 0: they do not */
    const float *sinks; /* of each query head of the kv head: a score without a value; NULL without */
    int64_t page_type;  /* see pages.h */
    int64_t row_bytes;  /* of a position of one head in a page */
    float k_scale, v_scale; /* of 8-bit floats */
};

/* What changes from step to step. All rows are contiguous. */
struct tm_step {
    int64_t tokens;
    void *const *buffers;          /* of each buffer: [tokens, its width] */
    const int64_t *widths;         /* of each buffer */
    const float *const *turns;     /* of each rope: [*, pairs, 2] */
    const int64_t *turns_by_position; /* of each rope: a row for each position, else for each token */
    const int64_t *pairs;          /* of each rope */
    void *pages;                   /* [slots, 2, blocks, kv_heads, page_size] rows, see pages.h */
    int64_t blocks, page_size;
    int64_t page_type;
    const float *page_scales;      /* [layers, 2] of keys and values as 8-bit floats; NULL: 1 */
    const int64_t *const *tables;  /* of each KV group: [*, columns] block ids */
    int64_t columns;
    const int64_t *rows;           /* [tokens] the row of each token in the tables */
    const int64_t *positions;      /* [tokens] */
    const float *scales;           /* [tokens] what SCALE multiplies with */
    const int64_t *tiles;          /* [tile_count + 1] first tokens of attention's tiles, then tokens */
    int64_t tile_count;
    void *scratch;                 /* EXPERTS: what tm_routed_scratch asks for */
    const void *adapters;          /* LORA: struct tm_lora_rows; NULL without adapters */
};

struct tm_model {
    int64_t is_bf16, heads, kv_heads, head_dim;
};

void tm_run(const struct tm_model *model, const struct tm_op *ops, int64_t count,
            const struct tm_step *step);

#endif
