/* Products of tiles by AMX, for processors that have it.
 *
 * A tile is 16 rows of up to 64 bytes. Tiles 0 to 3 hold sums [16 tokens][16 outputs], 4 and 5 tokens by
 * inputs, 6 and 7 inputs by outputs: a row has 4 bytes of each of 16 outputs, neighboring inputs. The
 * instructions are written by hand, as GCC 12's intrinsics do not say which memory they read.
 */
#ifndef TM_AMX_H
#define TM_AMX_H

#include <stdint.h>

enum { TILE_ROWS = 16, TILE_BYTES = 64 };

/* Whether this process uses tiles from now on, which it may not without asking the system; returns
 * whether it does. Not while kernels run. */
int tm_use_amx(int is_wanted);
int tm_has_amx(void);

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define TM_AMX

#define TILE_LOAD(TILE, FROM, STRIDE) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #TILE ::"r"(FROM), "r"((long)(STRIDE)) : "memory")
#define TILE_STORE(TILE, TO, STRIDE) \
    __asm__ volatile("tilestored %%tmm" #TILE ", (%0,%1,1)" ::"r"(TO), "r"((long)(STRIDE)) : "memory")
#define TILE_ZERO(TILE) __asm__ volatile("tilezero %%tmm" #TILE ::)
#define TILE_DOT(NAME, SUM, TOKENS, OUTPUTS) \
    __asm__ volatile(NAME " %%tmm" #OUTPUTS ", %%tmm" #TOKENS ", %%tmm" #SUM ::)
#define TILE_DOT_BF16(SUM, TOKENS, OUTPUTS) TILE_DOT("tdpbf16ps", SUM, TOKENS, OUTPUTS)
#define TILE_DOT_BYTES(SUM, TOKENS, OUTPUTS) TILE_DOT("tdpbssd", SUM, TOKENS, OUTPUTS)

/* Give this thread's tiles `rows` tokens and `bytes` bytes of inputs; to be ended by tiles_end. */
static inline void tiles_begin(int rows, int bytes) {
    struct {
        uint8_t palette, start, zeros[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        const int is_tokens = tile == 4 || tile == 5, is_outputs = tile > 5;
        shape.bytes[tile] = (uint16_t)(is_tokens ? bytes : TILE_BYTES);
        shape.rows[tile] = (uint8_t)(is_outputs ? bytes / 4 : rows);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shape) : "memory");
}

static inline void tiles_end(void) { __asm__ volatile("tilerelease"); }
#endif

#endif
