/* exponential_noise: Philox 4x32-10 in 64-bit lanes, whose lower halves hold the words. A product's
 * upper half is shifted down; what stays in the upper half of a lane is never multiplied. */
#include "noise.h"

#include "pool.h"
#include "vec.h"

enum {
    ROUNDS = 10,
    TOKENS_OF_CHUNK = 1 << 13, /* worth handing to another thread */
};

struct draw {
    __m512i keys[ROUNDS][2];
    __m512i position[2]; /* lower and upper word */
};

struct job {
    const int64_t *seeds, *positions, *ids;
    void *out;
    long tokens, chunks_of_row;
    int is_bits;
};

static struct draw draw_of(uint64_t seed, uint64_t position) {
    struct draw draw;
    uint32_t low = (uint32_t)seed, high = (uint32_t)(seed >> 32);
    for (int round = 0; round < ROUNDS; round++) {
        draw.keys[round][0] = _mm512_set1_epi64(low);
        draw.keys[round][1] = _mm512_set1_epi64(high);
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    draw.position[0] = _mm512_set1_epi64((uint32_t)position);
    draw.position[1] = _mm512_set1_epi64((long long)(position >> 32));
    return draw;
}

/* The words of eight blocks of four tokens. */
TM_INLINE void philox8(const struct draw *draw, __m512i blocks, __m512i words[4]) {
    const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m2 = _mm512_set1_epi64(0xCD9E8D57);
    __m512i c0 = blocks, c1 = draw->position[0], c2 = draw->position[1], c3 = _mm512_setzero_si512();
    _Pragma("GCC unroll 10") for (int round = 0; round < ROUNDS; round++) {
        __m512i p0 = _mm512_mul_epu32(c0, m0), p2 = _mm512_mul_epu32(c2, m2);
        c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p2, 32), c1, draw->keys[round][0], 0x96);
        c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3, draw->keys[round][1], 0x96);
        c1 = p2;
        c3 = p0;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

/* Lower half from `low`, upper half from the lower half of `high`. */
TM_INLINE __m512i halves(__m512i low, __m512i high) {
    return _mm512_mask_shuffle_epi32(low, 0xaaaa, high, 0xa0);
}

/* The words of tokens 4 * block to 4 * block + 31 in their order. */
TM_INLINE void words_of_32(const struct draw *draw, long block, __m512i out[2]) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i words[4];
    philox8(draw, _mm512_add_epi64(_mm512_set1_epi64(block), order), words);
    __m512i first = halves(words[0], words[1]), second = halves(words[2], words[3]);
    out[0] = _mm512_unpacklo_epi64(first, second);
    out[1] = _mm512_unpackhi_epi64(first, second);
}

/* The words of eight tokens. */
TM_INLINE __m256i words_of_ids(const struct draw *draw, __m512i ids) {
    __m512i words[4], lane = _mm512_and_epi64(ids, _mm512_set1_epi64(3));
    philox8(draw, _mm512_srli_epi64(ids, 2), words);
    __m512i word = words[0];
    for (int i = 1; i < 4; i++)
        word = _mm512_mask_mov_epi64(word, _mm512_cmpeq_epi64_mask(lane, _mm512_set1_epi64(i)), words[i]);
    return _mm512_cvtepi64_epi32(word);
}

/* 31 bits -> -log(1 - u) for u = (bits + 0.5) / 2^31: see the same function in triton.py. */
TM_INLINE __m512 exponential16(__m512i bits) {
    const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
    __m512 u = _mm512_mul_ps(_mm512_add_ps(_mm512_cvtepi32_ps(bits), _mm512_set1_ps(0.5f)), _mm512_set1_ps(0x1p-31f));
    u = _mm512_min_ps(u, _mm512_set1_ps(0x1.fffffep-1f));
    __m512i rest = _mm512_castps_si512(_mm512_sub_ps(one, u));
    __m512i k = _mm512_srai_epi32(_mm512_sub_epi32(rest, _mm512_set1_epi32(0x3F3504F3)), 23);
    __m512 m = _mm512_castsi512_ps(_mm512_sub_epi32(rest, _mm512_slli_epi32(k, 23)));
    __mmask16 is_small = _mm512_testn_epi32_mask(k, k);
    __m512 f = _mm512_mask_sub_ps(_mm512_sub_ps(m, one), is_small, _mm512_setzero_ps(), u);
    __m512 s = _mm512_div_ps(f, _mm512_add_ps(f, two)), z = _mm512_mul_ps(s, s);
    __m512 series = _mm512_set1_ps(1.0f / 11);
    series = _mm512_fmadd_ps(z, series, _mm512_set1_ps(1.0f / 9));
    series = _mm512_fmadd_ps(z, series, _mm512_set1_ps(1.0f / 7));
    series = _mm512_fmadd_ps(z, series, _mm512_set1_ps(1.0f / 5));
    series = _mm512_fmadd_ps(z, series, _mm512_set1_ps(1.0f / 3));
    __m512 twice = _mm512_mul_ps(two, s);
    __m512 log_m = _mm512_fmadd_ps(twice, _mm512_mul_ps(z, series), twice);
    return _mm512_fnmsub_ps(_mm512_cvtepi32_ps(k), _mm512_set1_ps(0.6931471805599453f), log_m);
}

TM_INLINE void store_words(const struct job *job, long at, __m512i words, __mmask16 mask) {
    __m512i bits = _mm512_srli_epi32(words, 1);
    if (job->is_bits)
        _mm512_mask_storeu_epi32((int32_t *)job->out + at, mask, bits);
    else
        store_some_f32((float *)job->out + at, mask, exponential16(bits));
}

static void fill_chunk(void *argument, long chunk) {
    const struct job *job = argument;
    const long row = chunk / job->chunks_of_row;
    const struct draw draw = draw_of((uint64_t)job->seeds[row], (uint64_t)job->positions[row]);
    const long first = chunk % job->chunks_of_row * TOKENS_OF_CHUNK, base = row * job->tokens;
    long end = first + TOKENS_OF_CHUNK;
    if (end > job->tokens) end = job->tokens;
    if (job->ids) {
        for (long i = first; i < end; i += 8) {
            __mmask8 mask = (__mmask8)lanes(end - i);
            __m256i words = words_of_ids(&draw, _mm512_maskz_loadu_epi64(mask, job->ids + base + i));
            store_words(job, base + i, _mm512_castsi256_si512(words), mask);
        }
        return;
    }
    for (long i = first; i < end; i += 32) {
        __m512i words[2];
        words_of_32(&draw, i / 4, words);
        store_words(job, base + i, words[0], lanes(end - i));
        if (end - i > 16) store_words(job, base + i + 16, words[1], lanes(end - i - 16));
    }
}

void tm_noise(const int64_t *seeds, const int64_t *positions, const int64_t *ids, void *out,
              long rows, long tokens, int is_bits) {
    const long chunks_of_row = (tokens + TOKENS_OF_CHUNK - 1) / TOKENS_OF_CHUNK;
    struct job job = {seeds, positions, ids, out, tokens, chunks_of_row, is_bits};
    tm_parallel(fill_chunk, &job, rows * chunks_of_row);
}
