/* Blocks of a KV pool [pieces][blocks][bytes] to images of them, and back. A chunk is a block: its
 * pieces lie far apart in the pool and side by side in its image. */
#include <stdint.h>
#include <string.h>

#include "pool.h"

struct copies {
    char *pool, *images;
    const int64_t *blocks, *slots;
    long pieces, piece_bytes, plane_bytes, image_bytes;
    int is_out;
};

static void copy_block(void *argument, long i) {
    const struct copies *job = argument;
    char *piece = job->pool + job->blocks[i] * job->piece_bytes;
    char *image = job->images + job->slots[i] * job->image_bytes;
    for (long n = 0; n < job->pieces; n++) {
        if (job->is_out)
            memcpy(image, piece, (size_t)job->piece_bytes);
        else
            memcpy(piece, image, (size_t)job->piece_bytes);
        piece += job->plane_bytes;
        image += job->piece_bytes;
    }
}

void tm_copy_blocks(struct copies *job, long blocks) {
    if (blocks > 0) tm_parallel(copy_block, job, blocks);
}
