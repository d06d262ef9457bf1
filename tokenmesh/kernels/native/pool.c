/* A pool of threads for the short parallel pieces of a forward pass, some microseconds each.
 *
 * The chunks of a piece are divided into a range for each thread, so that a thread reads a weight
 * from one place on without a gap. A thread whose range is empty takes chunks from the ends of
 * the other ranges: a helper that the system has put aside costs at most its chunk. Helpers spin for
 * a while after the last piece, which bridges the time between two layers, then sleep. One caller at
 * a time has the helpers; another one that comes meanwhile does its work alone. Which thread computes
 * a chunk never changes the result.
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
enum { CHUNK_BITS = 22, PIECE_BITS = 20 }; /* of a range's first and end; of its piece */

struct range {
    _Alignas(64) _Atomic uint64_t chunks; /* piece << 44 | end << 22 | first that is not taken */
};

static struct {
    struct range ranges[MAX_THREADS];
    _Alignas(64) _Atomic long done;
    _Alignas(64) _Atomic uint32_t piece;
    _Atomic int sleepers;
    atomic_flag taken;
    tm_chunk run;
    void *argument;
    _Atomic int threads;
    _Atomic long spin_ns;
} pool = {.taken = ATOMIC_FLAG_INIT, .threads = 1};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static uint64_t range_of(uint32_t piece, uint64_t first, uint64_t end) {
    return (uint64_t)(piece & ((1u << PIECE_BITS) - 1)) << 2 * CHUNK_BITS | end << CHUNK_BITS | first;
}

/* Take a chunk of piece number `piece` from the beginning or the end of a range; -1: none is left.
 * The piece cannot end before the chunk is done, so the pool's fields are stable until then. */
static long take(struct range *range, uint32_t piece, int from_end) {
    const uint64_t mask = (1u << CHUNK_BITS) - 1, number = range_of(piece, 0, 0);
    uint64_t seen = atomic_load_explicit(&range->chunks, memory_order_acquire);
    for (;;) {
        const uint64_t first = seen & mask, end = seen >> CHUNK_BITS & mask;
        if (seen - first - (end << CHUNK_BITS) != number || first == end) return -1;
        const uint64_t left = range_of(piece, first + !from_end, end - from_end);
        if (atomic_compare_exchange_weak(&range->chunks, &seen, left))
            return (long)(from_end ? end - 1 : first);
    }
}

static void run_range(struct range *range, uint32_t piece, int from_end) {
    for (long chunk; (chunk = take(range, piece, from_end)) >= 0;) {
        pool.run(pool.argument, chunk);
        atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
    }
}

/* Run the chunks of a thread's range, then what is left of the others. */
static void work(uint32_t piece, long thread) {
    run_range(pool.ranges + thread, piece, 0);
    const long threads = pool.threads;
    for (long i = 1; i < threads; i++) run_range(pool.ranges + (thread + i) % threads, piece, 1);
}

static void sleep_until_after(uint32_t piece) {
    atomic_fetch_add(&pool.sleepers, 1);
    if (atomic_load(&pool.piece) == piece)
        syscall(SYS_futex, &pool.piece, FUTEX_WAIT_PRIVATE, piece, NULL, NULL, 0);
    atomic_fetch_sub(&pool.sleepers, 1);
}

static void *help(void *number) {
    const long thread = (intptr_t)number;
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
        work(piece, thread);
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
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)pool.threads) != 0) break;
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
    if (chunks <= 1 || chunks >= 1 << CHUNK_BITS || pool.threads == 1 ||
        atomic_flag_test_and_set(&pool.taken)) {
        for (long chunk = 0; chunk < chunks; chunk++) run(argument, chunk);
        return;
    }
    const uint32_t piece = atomic_load(&pool.piece) + 1;
    const long threads = pool.threads;
    pool.run = run;
    pool.argument = argument;
    atomic_store(&pool.done, 0);
    for (long thread = 0; thread < threads; thread++)
        atomic_store_explicit(&pool.ranges[thread].chunks,
                              range_of(piece, (uint64_t)(thread * chunks / threads),
                                       (uint64_t)((thread + 1) * chunks / threads)),
                              memory_order_release);
    atomic_store(&pool.piece, piece);
    if (atomic_load(&pool.sleepers) > 0)
        syscall(SYS_futex, &pool.piece, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
    work(piece, 0);
    for (int look = 1; atomic_load_explicit(&pool.done, memory_order_acquire) < chunks; look++) {
        _mm_pause();
        if (look % LOOKS_PER_YIELD == 0) sched_yield();
    }
    atomic_flag_clear(&pool.taken);
}
