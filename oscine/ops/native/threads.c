/* A pool of threads that take tasks by a counter, and scratch memory. */
#include "oscine.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_THREADS 256
#define SPINS 1000 /* times that a thread looks for work before it sleeps or yields: 15 to 50 us, more than Python's pauses */
#define OPEN (1u << 15)
#define HELPERS (OPEN - 1)
#define GENERATION (1u << 16)

static int patience = SPINS; /* times that a thread looks for work before it sleeps */
static int num_threads = 1;  /* including the caller */
static int num_started;     /* excluding it */
static pid_t owner;         /* process of the threads that were started */
static pthread_mutex_t running = PTHREAD_MUTEX_INITIALIZER, sleeping = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t awake = PTHREAD_COND_INITIALIZER;
static int num_asleep; /* under `sleeping` */

static Task task;
static void *context;
static int64_t num_tasks;
static _Atomic int64_t next_task;
/* Generation of the job, whether threads may still join it, and how many have joined and not left. A thread that wakes
   up late finds the job closed: the job does not wait for it. */
static _Atomic uint64_t job;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_tasks(void) {
    for (int64_t i; (i = atomic_fetch_add(&next_task, 1)) < num_tasks;) task(context, i);
}

static uint64_t await_job(uint64_t generation) {
    for (int spin = 0; spin < patience; spin++, relax())
        if (atomic_load(&job) / GENERATION != generation) return atomic_load(&job);
    pthread_mutex_lock(&sleeping);
    num_asleep++;
    while (atomic_load(&job) / GENERATION == generation) pthread_cond_wait(&awake, &sleeping);
    num_asleep--;
    pthread_mutex_unlock(&sleeping);
    return atomic_load(&job);
}

static void *help(void *unused) {
    (void)unused;
    for (uint64_t generation = 0;;) {
        uint64_t seen = await_job(generation);
        generation = seen / GENERATION;
        while ((seen & OPEN) && seen / GENERATION == generation) {
            if (!atomic_compare_exchange_weak(&job, &seen, seen + 1)) continue;
            take_tasks();
            atomic_fetch_sub(&job, 1);
            break;
        }
    }
    return NULL;
}

/* Threads start at their first use. A forked process does not have its parent's threads. */
static void start_threads(void) {
    if (owner != getpid()) owner = getpid(), num_started = 0, num_asleep = 0, atomic_store(&job, 0);
    for (; num_started < num_threads - 1; num_started++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, NULL)) break;
        pthread_detach(thread);
    }
}

/* A greater number adds threads, a smaller one ends none; 1 leaves all work to the caller. */
void oscine_set_num_threads(int64_t count) { num_threads = (int)MAX(1, MIN(count, MOST_THREADS)); }

/* Sets how many times a thread looks for work before it sleeps. */
void oscine_set_patience(int64_t looks) { patience = (int)MAX(0, MIN(looks, 1 << 24)); }

void run_parallel(int64_t count, Task function, void *argument) {
    if (num_threads == 1 || count <= 1 || pthread_mutex_trylock(&running)) { /* another thread has the pool */
        for (int64_t i = 0; i < count; i++) function(argument, i);
        return;
    }
    start_threads();
    task = function, context = argument, num_tasks = count;
    atomic_store(&next_task, 0);
    atomic_store(&job, (atomic_load(&job) / GENERATION + 1) * GENERATION | OPEN);
    pthread_mutex_lock(&sleeping);
    if (num_asleep) pthread_cond_broadcast(&awake);
    pthread_mutex_unlock(&sleeping);
    take_tasks();
    atomic_fetch_and(&job, ~(uint64_t)OPEN);
    for (int spin = 0; atomic_load(&job) & HELPERS; spin++)
        if (spin < SPINS)
            relax();
        else
            sched_yield(); /* a thread that has no core */
    pthread_mutex_unlock(&running);
}

void ask_for_large_pages(void *memory, size_t bytes) {
    const uintptr_t page = 2 << 20, first = ((uintptr_t)memory + page - 1) / page * page;
    const uintptr_t last = ((uintptr_t)memory + bytes) / page * page;
#ifdef MADV_HUGEPAGE
    if (first < last) madvise((void *)first, last - first, MADV_HUGEPAGE);
#endif
}

static __thread struct {
    void *memory;
    size_t bytes;
} kept[SCRATCH_SLOTS];

void *scratch(int slot, size_t bytes) {
    bytes = MAX(bytes, 64);
    if (kept[slot].bytes < bytes) {
        free(kept[slot].memory);
        const size_t wanted = (bytes + bytes / 4 + 63) / 64 * 64;
        kept[slot].memory = aligned_alloc(64, wanted);
        kept[slot].bytes = kept[slot].memory ? wanted : 0;
        if (kept[slot].memory) ask_for_large_pages(kept[slot].memory, wanted);
    }
    return kept[slot].memory;
}

int oscine_fence(int64_t unused) {
    (void)unused;
    atomic_thread_fence(memory_order_seq_cst);
    return 0;
}
