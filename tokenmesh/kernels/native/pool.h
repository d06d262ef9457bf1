/* A pool of threads for short parallel work: see pool.c. */
#ifndef TM_POOL_H
#define TM_POOL_H

typedef void (*tm_chunk)(void *argument, long chunk);

int tm_pool_start(int threads, long spin_ns);
int tm_pool_threads(void);
void tm_parallel(tm_chunk run, void *argument, long chunks);

#endif
