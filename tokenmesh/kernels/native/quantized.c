/* Linear layers on codes of 4 or 8 bits, which are unpacked in registers.
 *
 * A panel is 32 outputs by all columns, and a code takes the place of
 *     8 bits: [columns / 4][32 outputs][4 columns]
 *     4 bits: [columns / 8][32 outputs][4 columns], columns c and c + 4 in one byte, c below
 * so that 64 bytes are four columns of 16 outputs, which one instruction multiplies with four int8
 * activations and adds up. The sums of a block of columns are exact integers; they are scaled and
 * added to the output in the order of the blocks, whatever the number of tokens: its bits do not
 * depend on the batch. Where activations stay float, a block's products are added up in order.
 */
#include "quantized.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"
#include "vec.h"

enum {
    PANEL = 32,
    MAX_ROWS = 8,            /* tokens of a tile of rounded activations: 16 accumulators */
    MAX_FLOAT_ROWS = 4,      /* of a tile of float activations */
    ROWS_AT_ONCE = 256,      /* tokens whose activations are prepared at a time */
    CHUNKS_OF_THREAD = 8,
    WORK_OF_CHUNK = 1 << 16, /* multiplications worth handing to another thread */
    PREPARED_OF_CHUNK = 1 << 13, /* activations worth it */
};

static const float SMALLEST = 1e-30f; /* activations of a block that are all smaller count as zeros */

struct job {
    const struct tm_quantized *weight;
    const void *x;
    void *out;
    int x_is_bf16, out_is_float;
    long M, ldx, grain, columns;
    int8_t *rounded;  /* [M, columns] */
    float *values;    /* [M, columns] instead */
    float *scales;    /* [M, blocks] of rounded ones */
    float *sums;      /* [M, blocks] of a block's activations */
    int32_t *starts;  /* [M, blocks] what a block's integer sums begin with: -center * their sum */
};

/* What a thread that calls has prepared; helpers read it. Bounded by ROWS_AT_ONCE and the widest
 * layer. */
static _Thread_local struct { char *memory; size_t size; } scratch;

static char *room(size_t size) {
    if (size > scratch.size) {
        free(scratch.memory);
        scratch.memory = aligned_alloc(64, (size + 63) / 64 * 64);
        if (!scratch.memory) abort(); /* some MiB: the process is out of memory */
        scratch.size = size;
    }
    return scratch.memory;
}

TM_INLINE float at(const struct job *job, const void *row, long i) {
    if (job->x_is_bf16) {
        uint32_t bits = (uint32_t)((const bf16 *)row)[i] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    return ((const float *)row)[i];
}

/* 16 activations from column `column` on, zeros past the last. */
TM_INLINE __m512 take16(const struct job *job, const void *row, long column) {
    const struct tm_quantized *w = job->weight;
    const long left = w->inputs - column;
    if (left <= 0) return _mm512_setzero_ps();
    if (w->order) {
        _Alignas(64) float found[16] = {0};
        for (long i = 0; i < (left < 16 ? left : 16); i++) found[i] = at(job, row, w->order[column + i]);
        return _mm512_load_ps(found);
    }
    if (job->x_is_bf16) return load_some_bf16((const bf16 *)row + column, lanes(left));
    return load_some_f32((const float *)row + column, lanes(left));
}

/* int8 activations of one block with one scale. NaN and infinity make the scale NaN. */
TM_INLINE void round_block(const struct job *job, const void *row, long token, long block) {
    const struct tm_quantized *w = job->weight;
    const long vectors = w->block / 16, first = block * w->block;
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512 x[4];
    __m512i most = _mm512_setzero_si512();
    for (long i = 0; i < vectors; i++) {
        x[i] = take16(job, row, first + 16 * i);
        most = _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(x[i]), magnitude));
    }
    const int bits = _mm512_reduce_max_epi32(most); /* of positive floats the order is that of ints */
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    const int is_finite = bits < 0x7f800000, is_zero = is_finite && largest < SMALLEST;
    const float scale = is_zero ? 0.0f : is_finite ? largest / 127.0f : NAN;
    const __m512 inverse = _mm512_set1_ps(is_finite && !is_zero ? 127.0f / largest : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    int8_t *to = job->rounded + token * job->columns + first;
    for (long i = 0; i < vectors; i++) {
        __m512i q = is_finite ? _mm512_cvtps_epi32(_mm512_mul_ps(x[i], inverse)) : _mm512_setzero_si512();
        _mm_storeu_si128((__m128i *)(to + 16 * i), _mm512_cvtepi32_epi8(q));
        sum = _mm512_add_epi32(sum, q);
    }
    const int total = _mm512_reduce_add_epi32(sum);
    const long place = token * w->blocks + block;
    job->scales[place] = scale;
    job->sums[place] = scale * (float)total;
    job->starts[place] = -(int32_t)w->center * total;
}

TM_INLINE void widen_block(const struct job *job, const void *row, long token, long block) {
    const struct tm_quantized *w = job->weight;
    const long first = block * w->block;
    float *to = job->values + token * job->columns + first;
    __m512 sum = _mm512_setzero_ps();
    for (long i = 0; i < w->block; i += 16) {
        __m512 x = take16(job, row, first + i);
        _mm512_storeu_ps(to + i, x);
        sum = _mm512_add_ps(sum, x);
    }
    job->sums[token * w->blocks + block] = _mm512_reduce_add_ps(sum);
}

static void prepare(void *argument, long chunk) {
    const struct job *job = argument;
    const struct tm_quantized *w = job->weight;
    long token = chunk * job->grain, end = token + job->grain;
    if (end > job->M) end = job->M;
    for (; token < end; token++) {
        const char *row = (const char *)job->x + token * job->ldx * (job->x_is_bf16 ? 2 : 4);
        for (long block = 0; block < w->blocks; block++) {
            if (w->rounds_activations)
                round_block(job, row, token, block);
            else
                widen_block(job, row, token, block);
        }
    }
}

/* 16 scales or offsets of group number `group` of all panels. */
TM_INLINE __m512 factors(const struct tm_quantized *w, const void *table, long group, int half) {
    const long place = group * PANEL + 16 * half;
    if (w->scales_are_half)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)table + place)));
    return _mm512_loadu_ps((const float *)table + place);
}

TM_INLINE void finish(const struct job *job, long token, long panel, int half, __m512 acc) {
    const struct tm_quantized *w = job->weight;
    const long column = panel * PANEL + 16 * half;
    if (column >= w->outputs) return;
    const __mmask16 mask = lanes(w->outputs - column);
    acc = _mm512_mul_ps(acc, _mm512_loadu_ps(w->channel + column));
    if (w->bias) acc = _mm512_add_ps(acc, load_some_f32(w->bias + column, mask));
    const long place = token * w->outputs + column;
    if (job->out_is_float || !job->x_is_bf16)
        store_some_f32((float *)job->out + place, mask, acc);
    else
        store_some_bf16((bf16 *)job->out + place, mask, acc);
}

/* The bytes that two vectors of codes of 4 bits, or one of 8, stand for; center not subtracted. */
TM_INLINE void unpack(const uint8_t *codes, const int BITS, const int HAS_TABLE, __m512i table, __m512i *out) {
    __m512i packed = _mm512_loadu_si512(codes);
    out[0] = packed;
    if (BITS == 8) return;
    const __m512i low = _mm512_set1_epi8(15);
    out[0] = _mm512_and_si512(packed, low);
    out[1] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), low);
    if (HAS_TABLE) {
        out[0] = _mm512_shuffle_epi8(table, out[0]);
        out[1] = _mm512_shuffle_epi8(table, out[1]);
    }
}

TM_INLINE __m512i four(const int8_t *p) {
    int numbers;
    memcpy(&numbers, p, sizeof numbers);
    return _mm512_set1_epi32(numbers);
}

/* ROWS tokens of int8 activations times one panel. */
TM_INLINE void rounded_tile(const struct job *job, long token, long panel, const int ROWS,
                            const int BITS, const int HAS_TABLE) {
    const struct tm_quantized *w = job->weight;
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)w->table));
    const int COLUMNS = 32 / BITS;
    const uint8_t *codes = w->codes + panel * PANEL * job->columns * BITS / 8;
    const int8_t *x = job->rounded + token * job->columns;
    __m512 acc[MAX_ROWS][2];
    for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    long group = panel * w->groups, left = w->group_blocks;
    for (long block = 0; block < w->blocks; block++) {
        __m512i sum[MAX_ROWS][2];
        for (int r = 0; r < ROWS; r++)
            sum[r][0] = sum[r][1] = _mm512_set1_epi32(job->starts[(token + r) * w->blocks + block]);
        for (long column = 0; column < w->block; column += COLUMNS) {
            __m512i first[2], second[2];
            unpack(codes, BITS, HAS_TABLE, table, first);
            unpack(codes + 64, BITS, HAS_TABLE, table, second);
            codes += 128;
            for (int part = 0; part < COLUMNS / 4; part++)
                _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) {
                    const __m512i a = four(x + r * job->columns + column + 4 * part);
                    sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], first[part], a);
                    sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], second[part], a);
                }
        }
        x += w->block;
        for (int half = 0; half < 2; half++) {
            const __m512 s = w->scales ? factors(w, w->scales, group, half) : _mm512_set1_ps(1.0f);
            _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) {
                const float scale = job->scales[(token + r) * w->blocks + block];
                const __m512 f = _mm512_mul_ps(s, _mm512_set1_ps(scale));
                acc[r][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][half]), f, acc[r][half]);
            }
            if (w->offsets) {
                const __m512 c = factors(w, w->offsets, group, half);
                _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) {
                    const __m512 all = _mm512_set1_ps(job->sums[(token + r) * w->blocks + block]);
                    acc[r][half] = _mm512_fmadd_ps(c, all, acc[r][half]);
                }
            }
        }
        if (--left == 0) {
            left = w->group_blocks;
            group++;
        }
    }
    for (int r = 0; r < ROWS; r++) {
        finish(job, token + r, panel, 0, acc[r][0]);
        finish(job, token + r, panel, 1, acc[r][1]);
    }
}

/* Number j of every four bytes. */
TM_INLINE __m512 number(__m512i bytes, const int j, const int IS_E4M3, __m512 center) {
    const __m512i byte = _mm512_and_si512(_mm512_srli_epi32(bytes, 8 * j), _mm512_set1_epi32(255));
    if (!IS_E4M3) return _mm512_sub_ps(_mm512_cvtepi32_ps(byte), center);
    const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(byte, _mm512_set1_epi32(128)), 24);
    const __m512i rest = _mm512_slli_epi32(_mm512_and_si512(byte, _mm512_set1_epi32(127)), 20);
    /* exponents of e4m3 are 120 less than those of float32, also those of its smallest numbers */
    const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(rest), _mm512_set1_ps(0x1p120f));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(value), sign));
}

/* ROWS tokens of float activations times one panel. */
TM_INLINE void float_tile(const struct job *job, long token, long panel, const int ROWS,
                          const int BITS, const int KIND) {
    const struct tm_quantized *w = job->weight;
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)w->table));
    const __m512 center = _mm512_set1_ps((float)w->center);
    const int COLUMNS = 32 / BITS;
    const uint8_t *codes = w->codes + panel * PANEL * job->columns * BITS / 8;
    const float *x = job->values + token * job->columns;
    __m512 acc[MAX_FLOAT_ROWS][2];
    for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    long group = panel * w->groups, left = w->group_blocks;
    for (long block = 0; block < w->blocks; block++) {
        __m512 sum[MAX_FLOAT_ROWS][2];
        for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
        for (long column = 0; column < w->block; column += COLUMNS) {
            __m512i bytes[2][2];
            unpack(codes, BITS, KIND == TM_TABLE, table, bytes[0]);
            unpack(codes + 64, BITS, KIND == TM_TABLE, table, bytes[1]);
            codes += 128;
            for (int part = 0; part < COLUMNS / 4; part++)
                _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
                    const __m512 first = number(bytes[0][part], j, KIND == TM_E4M3, center);
                    const __m512 second = number(bytes[1][part], j, KIND == TM_E4M3, center);
                    _Pragma("GCC unroll 4") for (int r = 0; r < ROWS; r++) {
                        const __m512 a = _mm512_set1_ps(x[r * job->columns + column + 4 * part + j]);
                        sum[r][0] = _mm512_fmadd_ps(first, a, sum[r][0]);
                        sum[r][1] = _mm512_fmadd_ps(second, a, sum[r][1]);
                    }
                }
        }
        x += w->block;
        for (int half = 0; half < 2; half++) {
            const __m512 s = w->scales ? factors(w, w->scales, group, half) : _mm512_set1_ps(1.0f);
            for (int r = 0; r < ROWS; r++) acc[r][half] = _mm512_fmadd_ps(sum[r][half], s, acc[r][half]);
            if (w->offsets) {
                const __m512 c = factors(w, w->offsets, group, half);
                for (int r = 0; r < ROWS; r++) {
                    const __m512 all = _mm512_set1_ps(job->sums[(token + r) * w->blocks + block]);
                    acc[r][half] = _mm512_fmadd_ps(c, all, acc[r][half]);
                }
            }
        }
        if (--left == 0) {
            left = w->group_blocks;
            group++;
        }
    }
    for (int r = 0; r < ROWS; r++) {
        finish(job, token + r, panel, 0, acc[r][0]);
        finish(job, token + r, panel, 1, acc[r][1]);
    }
}

typedef void (*tile_of_rows)(const struct job *, long, long);

#define ROUNDED(NAME, ROWS, BITS, TABLE)                                                           \
    static void NAME(const struct job *job, long token, long panel) {                              \
        rounded_tile(job, token, panel, ROWS, BITS, TABLE);                                        \
    }
#define FLOATS(NAME, ROWS, BITS, KIND)                                                             \
    static void NAME(const struct job *job, long token, long panel) {                              \
        float_tile(job, token, panel, ROWS, BITS, KIND);                                           \
    }
#define ALL_ROUNDED(NAME, BITS, TABLE)                                                             \
    ROUNDED(NAME##_1, 1, BITS, TABLE) ROUNDED(NAME##_2, 2, BITS, TABLE)                            \
    ROUNDED(NAME##_3, 3, BITS, TABLE) ROUNDED(NAME##_4, 4, BITS, TABLE)                            \
    ROUNDED(NAME##_5, 5, BITS, TABLE) ROUNDED(NAME##_6, 6, BITS, TABLE)                            \
    ROUNDED(NAME##_7, 7, BITS, TABLE) ROUNDED(NAME##_8, 8, BITS, TABLE)                            \
    static const tile_of_rows NAME[] = {NULL,      NAME##_1, NAME##_2, NAME##_3, NAME##_4,         \
                                        NAME##_5, NAME##_6, NAME##_7, NAME##_8};
#define ALL_FLOATS(NAME, BITS, KIND)                                                               \
    FLOATS(NAME##_1, 1, BITS, KIND) FLOATS(NAME##_2, 2, BITS, KIND)                                \
    FLOATS(NAME##_3, 3, BITS, KIND) FLOATS(NAME##_4, 4, BITS, KIND)                                \
    static const tile_of_rows NAME[] = {NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4};

ALL_ROUNDED(rounded8, 8, 0)
ALL_ROUNDED(rounded4, 4, 0)
ALL_ROUNDED(rounded_table4, 4, 1)
ALL_FLOATS(floats8, 8, TM_INTEGERS)
ALL_FLOATS(floats4, 4, TM_INTEGERS)
ALL_FLOATS(floats_table4, 4, TM_TABLE)
ALL_FLOATS(floats_e4m3, 8, TM_E4M3)

static const tile_of_rows *tiles_of(const struct tm_quantized *w) {
    if (w->kind == TM_E4M3) return floats_e4m3;
    if (w->rounds_activations)
        return w->bits == 8 ? rounded8 : w->kind == TM_TABLE ? rounded_table4 : rounded4;
    return w->bits == 8 ? floats8 : w->kind == TM_TABLE ? floats_table4 : floats4;
}

/* All tokens times the panels of one chunk. */
static void panels(void *argument, long chunk) {
    const struct job *job = argument;
    const struct tm_quantized *w = job->weight;
    const tile_of_rows *tiles = tiles_of(w);
    const long most = w->rounds_activations ? MAX_ROWS : MAX_FLOAT_ROWS;
    const long count = (w->outputs + PANEL - 1) / PANEL;
    long panel = chunk * job->grain, end = panel + job->grain;
    if (end > count) end = count;
    for (; panel < end; panel++)
        for (long token = 0; token < job->M;) {
            const long rows = job->M - token < most ? job->M - token : most;
            tiles[rows](job, token, panel);
            token += rows;
        }
}

static void run(struct job *job) {
    const struct tm_quantized *w = job->weight;
    const long threads = tm_pool_threads(), most = threads * CHUNKS_OF_THREAD;
    job->grain = PREPARED_OF_CHUNK / job->columns + 1;
    tm_parallel(prepare, job, (job->M + job->grain - 1) / job->grain);
    const long count = (w->outputs + PANEL - 1) / PANEL;
    long chunks = threads == 1 ? 1 : count * PANEL * job->columns * job->M / WORK_OF_CHUNK + 1;
    if (chunks > most) chunks = most;
    job->grain = (count + chunks - 1) / chunks;
    tm_parallel(panels, job, (count + job->grain - 1) / job->grain);
}

void tm_quantized_linear(const struct tm_quantized *weight, const void *x, long ldx, void *out,
                         int out_is_float, long M, int is_bf16) {
    const long columns = weight->blocks * weight->block;
    const long rows = M < ROWS_AT_ONCE ? M : ROWS_AT_ONCE;
    const size_t number_bytes = weight->rounds_activations ? 1 : sizeof(float);
    const size_t by_block = (size_t)(rows * weight->blocks);
    const size_t padded = ((size_t)(rows * columns) * number_bytes + 63) / 64 * 64;
    char *memory = room(padded + by_block * 3 * sizeof(float));
    float *blocks = (float *)(memory + padded);
    struct job job = {
        .weight = weight, .x_is_bf16 = is_bf16, .out_is_float = out_is_float, .ldx = ldx,
        .columns = columns, .rounded = (int8_t *)memory, .values = (float *)memory,
        .scales = blocks, .sums = blocks + by_block, .starts = (int32_t *)(blocks + 2 * by_block),
    };
    for (long first = 0; first < M; first += rows) {
        job.x = (const char *)x + first * ldx * (is_bf16 ? 2 : 4);
        job.out = (char *)out + first * weight->outputs * (is_bf16 && !out_is_float ? 2 : 4);
        job.M = M - first < rows ? M - first : rows;
        run(&job);
    }
}
