/* Linear layers on codes of 4, 5, 6 or 8 bits, which are unpacked in registers.
 *
 * A panel is 32 outputs by all columns. Four columns of 16 outputs are 64 bytes, which one instruction
 * multiplies with four int8 activations and adds up.
 *     8 bits: [columns / 4][32 outputs][4 columns]
 *     4 bits: [columns / 8][32 outputs][4 columns], columns c and c + 4 in one byte, c below
 *     5, 6 bits: for each 16 columns the lower 4 bits of the codes as above, then for each further bit
 *         [2][2 halves of the outputs][2] masks of 64 codes, in the order of the lower bits
 * E4M3 for bfloat16 activations has its columns in the order that `pairs_of` unpacks.
 *
 * The sums of a block of columns are exact integers; they are scaled and added to the output in the
 * order of the blocks, whatever the number of tokens: its bits do not depend on the batch. Where
 * activations stay float or bfloat16, a block's products are added up in order.
 */
#include "quantized.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "amx.h"
#include "pool.h"
#include "vec.h"

enum {
    PANEL = 32,
    MAX_ROWS = HAS_32_REGISTERS ? 8 : 4, /* tokens of a tile of rounded or bfloat16 activations */
    MAX_FLOAT_ROWS = 4,      /* of a tile of float activations */
    ROWS_AT_ONCE = 256,      /* tokens whose activations are prepared at a time: whole tiles */
    CHUNKS_OF_THREAD = 16,
    BYTES_AHEAD = 8192,      /* that are prefetched where one token cannot hide the memory's latency */
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
    bf16 *narrowed;   /* [M, columns] instead */
    float *scales;    /* [M, blocks] of rounded ones */
    float *sums;      /* [M, blocks] of a block's activations */
    long tiled;       /* tokens, a multiple of 16, whose scales and sums are [M / 16][blocks][16] */
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

/* Where the scale of a token of tiles is, so that those of 16 tokens are neighbors. */
TM_INLINE long in_tile(const struct tm_quantized *w, long token, long block) {
    return token / TILE_ROWS * TILE_ROWS * w->blocks + block * TILE_ROWS + token % TILE_ROWS;
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
    const long by_token = token * w->blocks + block;
    const long place = token < job->tiled ? in_tile(w, token, block) : by_token;
    job->scales[place] = scale;
    job->sums[place] = scale * (float)total;
    job->starts[by_token] = ((w->bits == 8 ? WIDE_CODES_FROM : 0) - (int32_t)w->center) * total;
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

TM_INLINE void narrow_block(const struct job *job, const void *row, long token, long block) {
    const struct tm_quantized *w = job->weight;
    const long first = block * w->block;
    bf16 *to = job->narrowed + token * job->columns + first;
    __m512 sum = _mm512_setzero_ps();
    for (long i = 0; i < w->block; i += 16) {
        store16_bf16(to + i, take16(job, row, first + i));
        sum = _mm512_add_ps(sum, load16_bf16(to + i));
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
            if (w->activations == TM_INT8)
                round_block(job, row, token, block);
            else if (w->activations == TM_BFLOAT16)
                narrow_block(job, row, token, block);
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

/* Four columns of the 32 outputs of a panel. */
struct quad { __m512i half[2]; };

enum { PART = 128 }; /* bytes of 8 columns' lower 4 bits, of a panel */

/* 4 lower bits of the codes of columns 4 * part to 4 * part + 3, of 8. */
TM_INLINE struct quad nibbles(const uint8_t *codes, const int part) {
    const __m512i low = _mm512_set1_epi8(15);
    struct quad out;
    for (int half = 0; half < 2; half++) {
        const __m512i packed = _mm512_loadu_si512(codes + 64 * half);
        out.half[half] = _mm512_and_si512(part ? _mm512_srli_epi16(packed, 4) : packed, low);
    }
    return out;
}

/* Codes of 4 columns from column 4 * place on, as bytes; center not subtracted. `codes` are those of
 * columns from a multiple of 16 on. */
TM_INLINE struct quad unpack(const uint8_t *codes, const int place, const int BITS, const int HAS_TABLE,
                             __m512i table) {
    struct quad out;
    if (BITS == 8) {
        for (int half = 0; half < 2; half++)
            out.half[half] = _mm512_loadu_si512(codes + PART * place + 64 * half);
        return out;
    }
    out = nibbles(codes + PART * (place / 2), place % 2);
    for (int half = 0; half < 2; half++) {
        if (HAS_TABLE) out.half[half] = _mm512_shuffle_epi8(table, out.half[half]);
        for (int bit = 4; bit < BITS; bit++) {
            __mmask64 mask;
            memcpy(&mask, codes + 2 * PART + 64 * (bit - 4) + 8 * (place / 2 * 4 + half * 2 + place % 2),
                   sizeof mask);
            out.half[half] = _mm512_mask_add_epi8(out.half[half], mask, out.half[half],
                                                  _mm512_set1_epi8((char)(1 << bit)));
        }
    }
    return out;
}

TM_INLINE __m512i four(const int8_t *p) {
    int numbers;
    memcpy(&numbers, p, sizeof numbers);
    return _mm512_set1_epi32(numbers);
}

/* Adds the products of a block's integers to the sums of some halves. Returns where the next block's are. */
TM_INLINE const uint8_t *add_block(const struct job *job, const uint8_t *codes, const int8_t *x,
                                   __m512i (*sum)[2], __m512i table, const int from, const int to,
                                   const int ROWS, const int BITS, const int HAS_TABLE) {
    for (long column = 0; column < job->weight->block; column += 16) {
        if (ROWS == 1 && BITS != 8)
            for (int byte = 0; byte < 64 * BITS; byte += 64)
                _mm_prefetch((const char *)codes + BYTES_AHEAD / 2 + byte, _MM_HINT_T0);
        _Pragma("GCC unroll 4") for (int place = 0; place < 4; place++) {
            const struct quad numbers = unpack(codes, place, BITS, HAS_TABLE, table);
            _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) {
                const __m512i a = four(x + r * job->columns + column + 4 * place);
                for (int half = from; half < to; half++)
                    sum[r][half] = dot_bytes(sum[r][half], numbers.half[half], a, BITS == 8);
            }
        }
        codes += 64 * BITS;
    }
    return codes;
}

/* The same of one token and 4 bits: upper halves of bytes stay where they are, and their sums are
 * divided by 16, which leaves no remainder. */
TM_INLINE const uint8_t *add_block_of_one(const struct job *job, const uint8_t *codes, const int8_t *x,
                                          __m512i (*sum)[2]) {
    const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8((char)0xf0);
    __m512i upper[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (long column = 0; column < job->weight->block; column += 8, codes += PART) {
        const __m512i a = four(x + column), b = four(x + column + 4);
        for (int half = 0; half < 2; half++) {
            _mm_prefetch((const char *)codes + BYTES_AHEAD + 64 * half, _MM_HINT_T0);
            const __m512i packed = _mm512_loadu_si512(codes + 64 * half);
            sum[0][half] = dot_bytes(sum[0][half], _mm512_and_si512(packed, low), a, 0);
            upper[half] = dot_bytes(upper[half], _mm512_and_si512(packed, high), b, 1);
        }
    }
    for (int half = 0; half < 2; half++)
        sum[0][half] = _mm512_add_epi32(sum[0][half], _mm512_srai_epi32(upper[half], 4));
    return codes;
}

/* ROWS tokens of int8 activations times some halves of one panel. */
TM_INLINE void rounded_part(const struct job *job, long token, long panel, const int from, const int to,
                            const int ROWS, const int BITS, const int HAS_TABLE) {
    const struct tm_quantized *w = job->weight;
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)w->table));
    const uint8_t *codes = w->codes + panel * PANEL * job->columns * BITS / 8;
    const int8_t *x = job->rounded + token * job->columns;
    const float *scales = job->scales + token * w->blocks, *sums = job->sums + token * w->blocks;
    const int32_t *starts = job->starts + token * w->blocks;
    __m512 acc[MAX_ROWS][2];
    for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    long group = panel * w->groups, left = w->group_blocks;
    for (long block = 0; block < w->blocks; block++) {
        __m512i sum[MAX_ROWS][2];
        _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++)
            for (int half = from; half < to; half++)
                sum[r][half] = _mm512_set1_epi32(starts[r * w->blocks + block]);
        if (HAS_32_REGISTERS && ROWS == 1 && BITS == 4 && !HAS_TABLE)
            codes = add_block_of_one(job, codes, x, sum);
        else
            codes = add_block(job, codes, x, sum, table, from, to, ROWS, BITS, HAS_TABLE);
        x += w->block;
        _Pragma("GCC unroll 2") for (int half = from; half < to; half++) {
            if (w->scales) {
                const __m512 s = factors(w, w->scales, group, half);
                _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) {
                    const __m512 f = _mm512_mul_ps(s, _mm512_set1_ps(scales[r * w->blocks + block]));
                    acc[r][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][half]), f, acc[r][half]);
                }
            } else {
                _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) {
                    const __m512 f = _mm512_set1_ps(scales[r * w->blocks + block]);
                    acc[r][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][half]), f, acc[r][half]);
                }
            }
            if (w->offsets) {
                const __m512 c = factors(w, w->offsets, group, half);
                _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) {
                    const __m512 all = _mm512_set1_ps(sums[r * w->blocks + block]);
                    acc[r][half] = _mm512_fmadd_ps(c, all, acc[r][half]);
                }
            }
        }
        if (--left == 0) {
            left = w->group_blocks;
            group++;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int half = from; half < to; half++) finish(job, token + r, panel, half, acc[r][half]);
}

/* The same times the whole panel, as much of it at a time as there are registers. */
TM_INLINE void rounded_tile(const struct job *job, long token, long panel, const int ROWS,
                            const int BITS, const int HAS_TABLE) {
    if (HAS_32_REGISTERS || ROWS == 1) {
        rounded_part(job, token, panel, 0, 2, ROWS, BITS, HAS_TABLE);
        return;
    }
    rounded_part(job, token, panel, 0, 1, ROWS, BITS, HAS_TABLE);
    rounded_part(job, token, panel, 1, 2, ROWS, BITS, HAS_TABLE);
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

/* acc += sums of a block, with their scales and offsets. */
TM_INLINE void add_scaled(const struct job *job, long token, long block, long group,
                          __m512 (*sum)[2], __m512 (*acc)[2], const int ROWS) {
    const struct tm_quantized *w = job->weight;
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
}

/* ROWS tokens of float activations times one panel. */
TM_INLINE void float_tile(const struct job *job, long token, long panel, const int ROWS,
                          const int BITS, const int KIND) {
    const struct tm_quantized *w = job->weight;
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)w->table));
    const __m512 center = _mm512_set1_ps((float)w->center);
    const uint8_t *codes = w->codes + panel * PANEL * job->columns * BITS / 8;
    const float *x = job->values + token * job->columns;
    __m512 acc[MAX_FLOAT_ROWS][2];
    for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    long group = panel * w->groups, left = w->group_blocks;
    for (long block = 0; block < w->blocks; block++) {
        __m512 sum[MAX_FLOAT_ROWS][2];
        for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
        for (long column = 0; column < w->block; column += 16, codes += 64 * BITS)
            _Pragma("GCC unroll 4") for (int place = 0; place < 4; place++) {
                const struct quad bytes = unpack(codes, place, BITS, KIND == TM_TABLE, table);
                _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
                    const __m512 first = number(bytes.half[0], j, KIND == TM_E4M3, center);
                    const __m512 second = number(bytes.half[1], j, KIND == TM_E4M3, center);
                    _Pragma("GCC unroll 4") for (int r = 0; r < ROWS; r++) {
                        const __m512 a = _mm512_set1_ps(x[r * job->columns + column + 4 * place + j]);
                        sum[r][0] = _mm512_fmadd_ps(first, a, sum[r][0]);
                        sum[r][1] = _mm512_fmadd_ps(second, a, sum[r][1]);
                    }
                }
            }
        x += w->block;
        add_scaled(job, token, block, group, sum, acc, ROWS);
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

#ifdef __AVX512VBMI__
/* Upper and lower bytes of the bfloat16 numbers that E4M3 codes 0 to 127 stand for. */
static uint8_t e4m3_upper[128], e4m3_lower[128];

__attribute__((constructor)) static void fill_e4m3(void) {
    for (int code = 0; code < 128; code++) {
        const int exponent = code >> 3, fraction = code & 7;
        const float value = ldexpf(exponent ? 8.0f + (float)fraction : (float)fraction,
                                   (exponent ? exponent : 1) - 10);
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        e4m3_upper[code] = (uint8_t)(bits >> 24);
        e4m3_lower[code] = (uint8_t)(bits >> 16);
    }
}

int tm_has_e4m3(void) { return 1; }

/* 16 outputs of 4 columns -> bfloat16 numbers of columns 0 and 1, and of 2 and 3. Of each 16 bytes the
 * first eight are columns 0 and 1 of four outputs. */
TM_INLINE void pairs_of(__m512i codes, const __m512i *upper, const __m512i *lower, __m512i *out) {
    const __m512i sign = _mm512_set1_epi8((char)128);
    const __m512i high = _mm512_permutex2var_epi8(upper[0], codes, upper[1]);
    const __m512i signed_high = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8); /* high | codes & sign */
    const __m512i low = _mm512_permutex2var_epi8(lower[0], codes, lower[1]);
    out[0] = _mm512_unpacklo_epi8(low, signed_high);
    out[1] = _mm512_unpackhi_epi8(low, signed_high);
}

/* ROWS tokens of bfloat16 activations times one panel of E4M3. */
TM_INLINE void narrowed_tile(const struct job *job, long token, long panel, const int ROWS) {
    const struct tm_quantized *w = job->weight;
    const __m512i upper[2] = {_mm512_loadu_si512(e4m3_upper), _mm512_loadu_si512(e4m3_upper + 64)};
    const __m512i lower[2] = {_mm512_loadu_si512(e4m3_lower), _mm512_loadu_si512(e4m3_lower + 64)};
    const uint8_t *codes = w->codes + panel * PANEL * job->columns;
    const bf16 *x = job->narrowed + token * job->columns;
    __m512 acc[MAX_ROWS][2];
    for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    long group = panel * w->groups, left = w->group_blocks;
    for (long block = 0; block < w->blocks; block++) {
        __m512 sum[MAX_ROWS][2];
        for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
        for (long column = 0; column < w->block; column += 4, codes += PART) {
            __m512i pair[2][2];
            pairs_of(_mm512_loadu_si512(codes), upper, lower, pair[0]);
            pairs_of(_mm512_loadu_si512(codes + 64), upper, lower, pair[1]);
            _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++)
                _Pragma("GCC unroll 2") for (int n = 0; n < 2; n++) {
                    const __m512i a = spread_bf16(x + r * job->columns + column + 2 * n);
                    sum[r][0] = dot_bf16(sum[r][0], pair[0][n], a);
                    sum[r][1] = dot_bf16(sum[r][1], pair[1][n], a);
                }
        }
        x += w->block;
        add_scaled(job, token, block, group, sum, acc, ROWS);
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
#else
int tm_has_e4m3(void) { return 0; }
#endif

typedef void (*tile_of_rows)(const struct job *, long, long);

/* Tiles of 1, 2, 3, 4, 6 and 8 tokens, by the number of tokens that are left. */
#define TILES(NAME, BODY)                                                                          \
    BODY(NAME, 1) BODY(NAME, 2) BODY(NAME, 3) BODY(NAME, 4) BODY(NAME, 6) BODY(NAME, 8)            \
    static const tile_of_rows NAME[] = {NULL,     NAME##_1, NAME##_2, NAME##_3, NAME##_4,          \
                                        NAME##_4, NAME##_6, NAME##_6, NAME##_8};
#define FEW_TILES(NAME, BODY)                                                                      \
    BODY(NAME, 1) BODY(NAME, 2) BODY(NAME, 3) BODY(NAME, 4)                                        \
    static const tile_of_rows NAME[] = {NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4};
#ifndef __AVX512F__
#undef TILES
#define TILES FEW_TILES
#endif
#define TILE_OF(NAME, ROWS, CALL)                                                                  \
    static void NAME##_##ROWS(const struct job *job, long token, long panel) { CALL; }
#define ROUNDED8(NAME, ROWS) TILE_OF(NAME, ROWS, rounded_tile(job, token, panel, ROWS, 8, 0))
#define ROUNDED6(NAME, ROWS) TILE_OF(NAME, ROWS, rounded_tile(job, token, panel, ROWS, 6, 0))
#define ROUNDED5(NAME, ROWS) TILE_OF(NAME, ROWS, rounded_tile(job, token, panel, ROWS, 5, 0))
#define ROUNDED4(NAME, ROWS) TILE_OF(NAME, ROWS, rounded_tile(job, token, panel, ROWS, 4, 0))
#define ROUNDED_TABLE(NAME, ROWS) TILE_OF(NAME, ROWS, rounded_tile(job, token, panel, ROWS, 4, 1))
#define NARROWED(NAME, ROWS) TILE_OF(NAME, ROWS, narrowed_tile(job, token, panel, ROWS))
#define FLOATS8(NAME, ROWS) TILE_OF(NAME, ROWS, float_tile(job, token, panel, ROWS, 8, TM_INTEGERS))
#define FLOATS6(NAME, ROWS) TILE_OF(NAME, ROWS, float_tile(job, token, panel, ROWS, 6, TM_INTEGERS))
#define FLOATS5(NAME, ROWS) TILE_OF(NAME, ROWS, float_tile(job, token, panel, ROWS, 5, TM_INTEGERS))
#define FLOATS4(NAME, ROWS) TILE_OF(NAME, ROWS, float_tile(job, token, panel, ROWS, 4, TM_INTEGERS))
#define FLOATS_TABLE(NAME, ROWS) TILE_OF(NAME, ROWS, float_tile(job, token, panel, ROWS, 4, TM_TABLE))
#define FLOATS_E4M3(NAME, ROWS) TILE_OF(NAME, ROWS, float_tile(job, token, panel, ROWS, 8, TM_E4M3))

TILES(rounded8, ROUNDED8)
TILES(rounded6, ROUNDED6)
TILES(rounded5, ROUNDED5)
TILES(rounded4, ROUNDED4)
TILES(rounded_table, ROUNDED_TABLE)
#ifdef __AVX512VBMI__
TILES(narrowed, NARROWED)
#endif
FEW_TILES(floats8, FLOATS8)
FEW_TILES(floats6, FLOATS6)
FEW_TILES(floats5, FLOATS5)
FEW_TILES(floats4, FLOATS4)
FEW_TILES(floats_table, FLOATS_TABLE)
FEW_TILES(floats_e4m3, FLOATS_E4M3)

/* Tokens of the tile that takes the most of `left`. */
TM_INLINE long rows_of(long left, long most) {
    if (left >= most) return most;
    return left >= 6 ? 6 : left > 4 ? 4 : left;
}

static const tile_of_rows *tiles_of(const struct tm_quantized *w) {
#ifdef __AVX512VBMI__
    if (w->activations == TM_BFLOAT16) return narrowed;
#endif
    const int is_rounded = w->activations == TM_INT8;
    if (w->kind == TM_E4M3) return floats_e4m3;
    if (w->kind == TM_TABLE) return is_rounded ? rounded_table : floats_table;
    switch (w->bits) {
    case 4: return is_rounded ? rounded4 : floats4;
    case 5: return is_rounded ? rounded5 : floats5;
    case 6: return is_rounded ? rounded6 : floats6;
    default: return is_rounded ? rounded8 : floats8;
    }
}

/* What code number `column` of an output in a panel stands for; not scaled. */
static float number_at(const struct tm_quantized *w, const uint8_t *panel, long lane, long column) {
    const long half = lane / 16, in_half = lane % 16;
    if (w->bits == 8) {
        const uint8_t *four = panel + column / 4 * PART + 64 * half;
        /* of bfloat16's order the first 8 of 16 bytes are columns 0 and 1 of four outputs */
        const uint8_t code = w->activations == TM_BFLOAT16
                                 ? four[in_half / 4 * 16 + column % 4 / 2 * 8 + in_half % 4 * 2 + column % 2]
                                 : four[in_half * 4 + column % 4];
        if (w->kind == TM_E4M3) {
            const int exponent = code >> 3 & 15, fraction = code & 7;
            const float size = ldexpf((float)(exponent ? 8 + fraction : fraction), (exponent ? exponent : 1) - 10);
            return code & 128 ? -size : size;
        }
        return (float)((int)code - (int)w->center);
    }
    const uint8_t *some = panel + column / 16 * 64 * w->bits;
    const long step = column % 16 / 8, part = column % 8 / 4, place = in_half * 4 + column % 4;
    int code = some[step * PART + half * 64 + place] >> 4 * part & 15;
    if (w->kind == TM_TABLE) code = w->table[code];
    for (int bit = 4; bit < w->bits; bit++) {
        const uint8_t *masks = some + 2 * PART + 64 * (bit - 4) + 8 * (4 * step + 2 * half + part);
        code |= (masks[place / 8] >> place % 8 & 1) << bit;
    }
    return (float)(code - (int)w->center);
}

static float factor_at(const struct tm_quantized *w, const void *table, long place) {
    if (!w->scales_are_half) return ((const float *)table)[place];
    const __m256i halves = _mm256_set1_epi16((short)((const uint16_t *)table)[place]);
    return _mm512_cvtss_f32(_mm512_cvtph_ps(halves));
}

int tm_quantized_rows(const struct tm_quantized *w, const int64_t *index, long count, void *out, int is_bf16) {
    const long columns = w->blocks * w->block, size = w->group_blocks * w->block;
    for (long i = 0; i < count; i++) {
        const long row = index[i], lane = row % PANEL;
        if (row < 0 || row >= w->outputs) return 1;
        const uint8_t *panel = w->codes + row / PANEL * PANEL * columns * w->bits / 8;
        for (long column = 0; column < w->inputs; column++) {
            const long place = (row / PANEL * w->groups + column / size) * PANEL + lane;
            float value = number_at(w, panel, lane, column);
            if (w->scales) value *= factor_at(w, w->scales, place);
            if (w->offsets) value += factor_at(w, w->offsets, place);
            value *= w->channel[row];
            const long to = i * w->inputs + (w->order ? w->order[column] : column);
            if (is_bf16)
                store_some_bf16((bf16 *)out + to, 1, _mm512_set1_ps(value));
            else
                ((float *)out)[to] = value;
        }
    }
    return 0;
}

/* All tokens times the panels of one chunk. */
static void panels(void *argument, long chunk) {
    const struct job *job = argument;
    const struct tm_quantized *w = job->weight;
    const tile_of_rows *tiles = tiles_of(w);
    const long most = w->activations == TM_FLOATS ? MAX_FLOAT_ROWS : MAX_ROWS;
    const long count = (w->outputs + PANEL - 1) / PANEL;
    long panel = chunk * job->grain, end = panel + job->grain;
    if (end > count) end = count;
    for (; panel < end; panel++)
        for (long token = 0; token < job->M;) {
            const long rows = rows_of(job->M - token, most);
            tiles[rows](job, token, panel);
            token += rows;
        }
}

#include "quantized_tiles.inc"

/* What multiplies the panels of a chunk; notes which tokens tiles take. */
static tm_chunk multiplier_of(struct job *job) {
    job->tiled = 0;
#ifdef TM_AMX
    if (tm_has_amx() && job->weight->activations == TM_INT8 && job->M >= TILED_FROM &&
        are_signed_bytes(job->weight)) {
        const long left = job->M % TILE_ROWS;
        job->tiled = job->M - left + (left >= FILLED_FROM ? TILE_ROWS : 0);
        return tiled_panels;
    }
#endif
    return panels;
}

static void run(struct job *job) {
    const struct tm_quantized *w = job->weight;
    const tm_chunk multiply = multiplier_of(job);
    const long threads = tm_pool_threads(), most = threads * CHUNKS_OF_THREAD;
    job->grain = PREPARED_OF_CHUNK / job->columns + 1;
    tm_parallel(prepare, job, (job->M + job->grain - 1) / job->grain);
    const long count = (w->outputs + PANEL - 1) / PANEL;
    long chunks = threads == 1 ? 1 : count * PANEL * job->columns * job->M / WORK_OF_CHUNK + 1;
    if (chunks > most) chunks = most;
    job->grain = (count + chunks - 1) / chunks;
    tm_parallel(multiply, job, (count + job->grain - 1) / job->grain);
}

void tm_quantized_linear(const struct tm_quantized *weight, const void *x, long ldx, void *out,
                         int out_is_float, long M, int is_bf16) {
    const long columns = weight->blocks * weight->block;
    const long rows = M < ROWS_AT_ONCE ? M : ROWS_AT_ONCE;
    const long held = (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; /* a tile reads what no token has filled */
    const size_t number_bytes = weight->activations == TM_INT8       ? 1
                                : weight->activations == TM_BFLOAT16 ? sizeof(bf16)
                                                                     : sizeof(float);
    const size_t by_block = (size_t)(held * weight->blocks);
    const size_t padded = ((size_t)(held * columns) * number_bytes + 63) / 64 * 64;
    char *memory = room(padded + by_block * 3 * sizeof(float));
    float *blocks = (float *)(memory + padded);
    struct job job = {
        .weight = weight, .x_is_bf16 = is_bf16, .out_is_float = out_is_float, .ldx = ldx,
        .columns = columns, .rounded = (int8_t *)memory, .values = (float *)memory,
        .narrowed = (bf16 *)memory,
        .scales = blocks, .sums = blocks + by_block, .starts = (int32_t *)(blocks + 2 * by_block),
    };
    /* numbers that nobody wrote would be as good, but some are slow to compute with */
    const long last = (held - TILE_ROWS) * weight->blocks; /* of the tile that may not be full */
    memset(job.scales + last, 0, (size_t)(TILE_ROWS * weight->blocks) * sizeof(float));
    memset(job.sums + last, 0, (size_t)(TILE_ROWS * weight->blocks) * sizeof(float));
    for (long first = 0; first < M; first += rows) {
        job.x = (const char *)x + first * ldx * (is_bf16 ? 2 : 4);
        job.out = (char *)out + first * weight->outputs * (is_bf16 && !out_is_float ? 2 : 4);
        job.M = M - first < rows ? M - first : rows;
        run(&job);
    }
}
