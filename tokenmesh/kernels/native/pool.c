/* A pool of threads for the short parallel pieces of a forward pass, some microseconds each.
 *
 * The caller works too, and chunks are taken one by one: a helper that the system has put aside
 * costs at most its chunk. Helpers spin for a while after the last piece, which bridges the time
 * between two layers, then sleep. One caller at a time has the helpers; another one that comes
 * meanwhile does its work alone. Which thread computes a chunk never changes the result.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 256, LOOKS_PER_CLOCK = 32, LOOKS_PER_YIELD = 4096 };

static struct {
    _Alignas(64) _Atomic uint64_t ticket; /* number of the piece << 32 | chunks not yet taken */
    _Alignas(64) _Atomic long done;
    _Alignas(64) _Atomic uint32_t piece;
    _Atomic int sleepers;
    atomic_flag taken;
    tm_chunk run;
    void *argument;
    long chunks;
    _Atomic int threads;
    _Atomic long spin_ns;
} pool = {.taken = ATOMIC_FLAG_INIT, .threads = 1};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Take and run chunks of piece number `piece` until none is left. */
static void work(uint32_t piece) {
    uint64_t ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
    while ((uint32_t)(ticket >> 32) == piece && (uint32_t)ticket > 0) {
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket - 1)) continue;
        /* The piece cannot end before this chunk is done, so its fields are stable here. */
        pool.run(pool.argument, pool.chunks - (long)(uint32_t)ticket);
        atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
        ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
    }
}

static void sleep_until_after(uint32_t piece) {
    atomic_fetch_add(&pool.sleepers, 1);
    if (atomic_load(&pool.piece) == piece)
        syscall(SYS_futex, &pool.piece, FUTEX_WAIT_PRIVATE, piece, NULL, NULL, 0);
    atomic_fetch_sub(&pool.sleepers, 1);
}

static void *help(void *unused) {
    (void)unused;
    uint32_t seen = 0;
    for (;;) {
        int64_t until = now_ns() + pool.spin_ns;
        uint32_t piece = atomic_load_explicit(&pool.piece, memory_order_acquire);
        for (int look = 0; piece == seen; look++) {
            _mm_pause();
            if (look % LOOKS_PER_CLOCK == 0 && now_ns() > until) sleep_until_after(seen);
            piece = atomic_load_explicit(&pool.piece, memory_order_acquire);
        }
        seen = piece;
        work(piece);
    }
    return NULL;
}

/* Have `threads` threads in all, the caller's included; a pool never shrinks. Returns the number
 * there is, less when the system refuses. */
int tm_pool_start(int threads, long spin_ns) {
    while (atomic_flag_test_and_set(&pool.taken)) sched_yield();
    pool.spin_ns = spin_ns;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    while (pool.threads < threads) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, NULL) != 0) break;
        pthread_detach(thread);
        pool.threads++;
    }
    int there = pool.threads;
    atomic_flag_clear(&pool.taken);
    return there;
}

int tm_pool_threads(void) { return pool.threads; }

/* Run chunks 0 to `chunks` - 1 and return when all are done. */
void tm_parallel(tm_chunk run, void *argument, long chunks) {
    if (chunks <= 1 || pool.threads == 1 || atomic_flag_test_and_set(&pool.taken)) {
        for (long chunk = 0; chunk < chunks; chunk++) run(argument, chunk);
        return;
    }
    uint32_t piece = atomic_load(&pool.piece) + 1;
    pool.run = run;
    pool.argument = argument;
    pool.chunks = chunks;
    atomic_store(&pool.done, 0);
    atomic_store(&pool.ticket, (uint64_t)piece << 32 | (uint64_t)chunks);
    atomic_store(&pool.piece, piece);
    if (atomic_load(&pool.sleepers) > 0)
        syscall(SYS_futex, &pool.piece, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
    work(piece);
    for (int look = 1; atomic_load_explicit(&pool.done, memory_order_acquire) < chunks; look++) {
        _mm_pause();
        if (look % LOOKS_PER_YIELD == 0) sched_yield();
    }
    atomic_flag_clear(&pool.taken);
}
