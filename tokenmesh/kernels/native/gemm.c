/* Linear layers for any number of tokens on one packed copy of the weight. */
#include "gemm.h"

#include <stdlib.h>
#include <string.h>

#include "amx.h"
#include "pool.h"
#include "vec.h"

enum {
    CHUNKS_OF_THREAD = 8,
    WORK_OF_CHUNK = 1 << 15, /* multiplications worth handing to another thread */
};

#include "typed.h"
#include "tile.inc"
#include "gemm.inc"
#define TM_BF16
#include "typed.h"
#include "tile.inc"
#include "gemm.inc"

#include "gemm_tiles.inc"

static void multiply_any_bf16(struct product_bf16 *job) {
#ifdef TM_AMX
    if (tm_has_amx() && job->K % TILE_INPUTS == 0) {
        struct tiled tiled = {*job, NULL};
        if (job->M > TILE_ROWS && job->M % TILE_ROWS) tiled.rest = copy_rest(job);
        tm_parallel(tiled_columns, &tiled, (job->N + job->grain - 1) / job->grain);
        return;
    }
#endif
    multiply_bf16(job);
}

void tm_linear(const void *x, long ldx, const void *weight, const void *bias, void *out,
               int out_is_float, long M, long N, long K, int is_bf16) {
    if (is_bf16) {
        struct product_bf16 job = {x, weight, bias, out, out_is_float, M, N, K, ldx, 0};
        job.grain = panels_of_chunk_bf16(&job) * PANEL;
        multiply_any_bf16(&job);
    } else {
        struct product_f32 job = {x, weight, bias, out, out_is_float, M, N, K, ldx, 0};
        job.grain = panels_of_chunk_f32(&job) * PANEL;
        multiply_f32(&job);
    }
}
