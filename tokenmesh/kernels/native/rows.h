/* Encoders: attention within the rows of a step, whose tokens see each other both ways. */
#ifndef TM_ROWS_H
#define TM_ROWS_H

#include <stdint.h>

/* Strides count elements. */
struct tm_rows {
    const void *query, *key, *value;
    void *out;             /* [tokens, heads, value_dim] without gaps */
    const int64_t *firsts; /* [rows + 1] the first token of each row, and the end */
    long query_token, query_head, key_token, key_head, value_token, value_head;
    long rows, heads, kv_heads, dim, value_dim;
    long window; /* how far a token sees to either side; -1: the whole row */
    float scale;
};

#endif
