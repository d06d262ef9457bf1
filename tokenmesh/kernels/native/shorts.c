/* Linear layers in float32 by products of 16-bit integers. In one instruction a processor computes
 * twice as many of these as of float32.
 *
 * A row of x is rounded to integers of 14 bits with a scale for each block of 64 inputs, a row of the
 * weight to integers of 16 bits with one scale. No sum of a block overflows 32 bits: integers of x are
 * at most SHORTS_MOST in size, and in a block those of a row of the weight add up to at most
 * 2^31 / SHORTS_MOST in size. Sums of a block are exact; blocks are added up in float32, in order.
 * Rounding moves an output by about 1e-4 of the size of its sum if the products had random signs, a
 * tenth of what bfloat16 does. An output's bits do not depend on other rows.
 *
 * Outputs of a row with a number that is not finite are NaN.
 */
#include "shorts.h"

#include <math.h>
#include <stdlib.h>

#include "gelu.h"
#include "pool.h"
#include "vec.h"

enum {
    WIDTH = 32,         /* outputs of a panel */
    TILE_ROWS = 12,     /* 24 accumulators of 32 registers */
    MOST_ROWS = 96,     /* of a chunk */
    ROWS_BYTES = 1 << 18, /* of a chunk's integers, which stay in the second cache */
    CHUNKS_OF_THREAD = 4,
};

struct product {
    const struct tm_shorts *weight;
    const float *x;
    float *out;
    long ldx, M, rows, panels, groups; /* rows of a chunk, panels of a chunk, chunks of a block of rows */
    int has_gelu;
};

/* Of one thread: a chunk's rows as integers [rows][columns], and the scales of their blocks. */
static _Thread_local struct {
    int16_t *numbers;
    float *scales;
    size_t room;
} scratch;

/* Whether there is memory for `numbers` integers. */
static int reserve(size_t numbers) {
    if (scratch.room >= numbers) return 1;
    free(scratch.numbers);
    scratch.room = 0;
    const size_t bytes = (numbers * sizeof(int16_t) + 63) & ~(size_t)63;
    const size_t scales = (numbers / SHORTS_BLOCK * sizeof(float) + 63) & ~(size_t)63;
    scratch.numbers = aligned_alloc(64, bytes + scales);
    if (!scratch.numbers) return 0;
    scratch.scales = (float *)((char *)scratch.numbers + bytes);
    scratch.room = numbers;
    return 1;
}

/* One block of a row; returns its scale. */
TM_INLINE float round_block(const float *x, long left, int16_t *numbers) {
    const __m512i size = _mm512_set1_epi32(0x7fffffff);
    __m512 v[4];
    __m512i top = _mm512_setzero_si512();
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        const long some = left - 16 * i;
        v[i] = some > 0 ? _mm512_maskz_loadu_ps(lanes(some), x + 16 * i) : _mm512_setzero_ps();
        /* as integers, sizes of floats have their order, and a NaN is above all */
        top = _mm512_max_epu32(top, _mm512_and_si512(_mm512_castps_si512(v[i]), size));
    }
    const uint32_t bits = _mm512_reduce_max_epu32(top);
    float most;
    __builtin_memcpy(&most, &bits, sizeof most);
    if (!(most < INFINITY)) most = NAN;
    const float factor = most < 1e-30f ? 0.0f : (float)SHORTS_MOST / most;
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        const __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], _mm512_set1_ps(factor)));
        _mm256_store_si256((__m256i *)(numbers + 16 * i), _mm512_cvtsepi32_epi16(n));
    }
    return most / (float)SHORTS_MOST;
}

/* Place of a block of a row in the scratch: tiles of 12 rows, in which a block's rows lie side by side. */
TM_INLINE long place_of(long row, long block, long blocks) {
    return (row / TILE_ROWS * blocks + block) * TILE_ROWS + row % TILE_ROWS;
}

static void round_rows(const struct product *job, long row, long rows) {
    const long blocks = job->weight->columns / SHORTS_BLOCK, inputs = job->weight->inputs;
    for (long r = 0; r < rows; r++)
        for (long block = 0; block < blocks; block++) {
            const long place = place_of(r, block, blocks), k = block * SHORTS_BLOCK;
            const float *x = job->x + (row + r) * job->ldx + k;
            scratch.scales[place] = round_block(x, inputs - k, scratch.numbers + place * SHORTS_BLOCK);
        }
}

TM_INLINE void finish(const struct product *job, long row, long column, __m512 sum) {
    const struct tm_shorts *w = job->weight;
    if (column >= w->outputs) return;
    const __mmask16 mask = lanes(w->outputs - column);
    sum = _mm512_mul_ps(sum, _mm512_loadu_ps(w->scales + column));
    if (w->bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, w->bias + column));
    if (job->has_gelu) sum = gelu_erf16(sum);
    _mm512_mask_storeu_ps(job->out + row * w->outputs + column, mask, sum);
}

/* ROWS tokens, from number `first` of the scratch on, times one panel. */
#define SHORTS_TILE(ROWS)                                                                          \
    static void tile_##ROWS(const struct product *job, long row, long first, long panel) {         \
        const long columns = job->weight->columns, place = place_of(first, 0, columns / SHORTS_BLOCK);\
        const int16_t *w = job->weight->panels + panel * WIDTH * columns;                          \
        const int16_t *x = scratch.numbers + place * SHORTS_BLOCK;                                 \
        const float *scales = scratch.scales + place;                                              \
        _Alignas(64) float sums[ROWS][WIDTH] = {{0}};                                              \
        for (long block = 0; block < columns; block += SHORTS_BLOCK) {                             \
            __m512i acc[ROWS][2];                                                                  \
            _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; r++)                                \
                acc[r][0] = acc[r][1] = _mm512_setzero_si512();                                    \
            for (int k = 0; k < SHORTS_BLOCK; k += 2) {                                            \
                const __m512i low = _mm512_loadu_si512(w + k * WIDTH);                             \
                const __m512i high = _mm512_loadu_si512(w + k * WIDTH + 32);                       \
                _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; r++) {                          \
                    const __m512i a = spread_bf16((const bf16 *)x + r * SHORTS_BLOCK + k);         \
                    acc[r][0] = dot_shorts(acc[r][0], a, low);                              \
                    acc[r][1] = dot_shorts(acc[r][1], a, high);                             \
                }                                                                                  \
            }                                                                                      \
            _Pragma("GCC unroll 12") for (int r = 0; r < ROWS; r++) {                              \
                const __m512 scale = _mm512_set1_ps(scales[r]);                                    \
                _Pragma("GCC unroll 2") for (int n = 0; n < 2; n++) {                              \
                    float *sum = sums[r] + 16 * n;                                                 \
                    const __m512 more = _mm512_cvtepi32_ps(acc[r][n]);                             \
                    _mm512_store_ps(sum, _mm512_fmadd_ps(more, scale, _mm512_load_ps(sum)));       \
                }                                                                                  \
            }                                                                                      \
            w += SHORTS_BLOCK * WIDTH;                                                             \
            x += SHORTS_BLOCK * TILE_ROWS;                                                         \
            scales += TILE_ROWS;                                                                   \
        }                                                                                          \
        for (int r = 0; r < ROWS; r++)                                                             \
            for (int n = 0; n < 2; n++)                                                            \
                finish(job, row + r, panel * WIDTH + 16 * n, _mm512_load_ps(sums[r] + 16 * n));    \
    }

SHORTS_TILE(1) SHORTS_TILE(2) SHORTS_TILE(3) SHORTS_TILE(4) SHORTS_TILE(5) SHORTS_TILE(6)
SHORTS_TILE(7) SHORTS_TILE(8) SHORTS_TILE(9) SHORTS_TILE(10) SHORTS_TILE(11) SHORTS_TILE(12)
#undef SHORTS_TILE

typedef void (*tile_fn)(const struct product *, long row, long first, long panel);

static const tile_fn tiles[] = {
    NULL, tile_1, tile_2, tile_3, tile_4, tile_5, tile_6, tile_7, tile_8, tile_9, tile_10, tile_11, tile_12,
};

static void fail(const struct product *job, long row, long rows) {
    for (long i = row * job->weight->outputs; i < (row + rows) * job->weight->outputs; i++) job->out[i] = NAN;
}

/* Some rows times some panels. */
static void multiply(void *argument, long chunk) {
    const struct product *job = argument;
    const long row = chunk / job->groups * job->rows, group = chunk % job->groups;
    const long rows = job->M - row < job->rows ? job->M - row : job->rows;
    const long panels = (job->weight->outputs + WIDTH - 1) / WIDTH;
    const long begin = group * job->panels, end = begin + job->panels < panels ? begin + job->panels : panels;
    if (!reserve((size_t)(job->rows * job->weight->columns))) {
        fail(job, row, rows);
        return;
    }
    round_rows(job, row, rows);
    for (long panel = begin; panel < end; panel++)
        for (long first = 0; first < rows; first += TILE_ROWS) {
            const long some = rows - first < TILE_ROWS ? rows - first : TILE_ROWS;
            tiles[some](job, row + first, first, panel);
        }
}

void tm_shorts_linear(const struct tm_shorts *weight, const float *x, long ldx, float *out, long M,
                      int has_gelu) {
    if (M <= 0) return;
    struct product job = {weight, x, out, ldx, M, 0, 0, 1, has_gelu};
    const long panels = (weight->outputs + WIDTH - 1) / WIDTH;
    const long rows = ROWS_BYTES / (long)sizeof(int16_t) / weight->columns / TILE_ROWS * TILE_ROWS;
    job.rows = rows < TILE_ROWS ? TILE_ROWS : rows > MOST_ROWS ? MOST_ROWS : rows;
    const long blocks = (M + job.rows - 1) / job.rows, wanted = (long)tm_pool_threads() * CHUNKS_OF_THREAD;
    /* few rows: several threads share a block's panels */
    long groups = tm_pool_threads() == 1 ? 1 : (wanted + blocks - 1) / blocks;
    if (groups > panels) groups = panels;
    job.panels = (panels + groups - 1) / groups;
    job.groups = (panels + job.panels - 1) / job.panels;
    tm_parallel(multiply, &job, blocks * job.groups);
}
