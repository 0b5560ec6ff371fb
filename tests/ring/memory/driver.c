/* The ring's core in C, for sanitizers and as the yardstick of the bench.
 *
 *   driver threads COUNT         publishers and gating consumers, threads on one mapping: exact counts, one order
 *   driver seats COUNT           threads take and free seats of one handle: each that is taken is locked, all are free at the end
 *   driver noise ROUNDS SEED     noise in shared memory; then everything is tried
 *   driver publish FD COUNT SIZE BATCH WAIT / driver consume FD COUNT BATCH WAIT   one end of a ring that another process made
 *   driver copy COUNT SIZE       memcpy and one atomic store a message: prints ns
 */
#define _GNU_SOURCE
#include "core.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define PUBLISHERS 3
#define CONSUMERS 2

static void must(int holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "driver: %s (errno %d)\n", what, errno);
    exit(1);
}

static struct ring_handle opened(int fd, uint64_t size)
{
    char path[32];
    struct ring_handle h;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int locks = open(path, O_RDWR | O_CLOEXEC);
    must(locks >= 0 && !ring_map(&h, locks, size), "map");
    return h;
}

static struct ring_handle made(uint64_t size)
{
    static const uint8_t boot[16] = {1};
    int fd = (int)syscall(SYS_memfd_create, "driver", 3u);
    must(fd >= 0 && !ring_allocate(fd, size), "allocate");
    struct ring_handle h = opened(fd, size);
    ring_make(h.shared, size, 1, boot, 1, 0);
    must(!ring_check(&h.shared->fixed, size + RING_HEAD_BYTES, boot), "check");
    close(fd);
    return h;
}

static unsigned sit(struct ring_handle *h, uint64_t *position)
{
    must(!ring_lock(h->shared, INT64_MAX), "lock");
    int slot = ring_take_slot(h, SLOT_GATES, position);
    ring_unlock(h->shared);
    must(slot >= 0, "slot");
    return (unsigned)slot;
}

static void publish(struct ring_handle *h, const struct ring_part *parts, size_t count)
{
    uint64_t total = 0, last;
    for (size_t i = 0; i < count; i++) total += ring_part_bytes(&parts[i]);
    for (;;) {
        int result = ring_publish(h, parts, count, total, RING_NAP_NS, &last);
        if (!result) return;
        must(result == RING_BUSY || result == RING_FULL, "publish");
        if (result == RING_FULL) ring_await_room(h, total, RING_NAP_NS);
    }
}

/* The next record's body into `to`; its head is returned. Releases every 1/16 of the ring, and before it waits. */
static struct ring_record consume(struct ring_handle *h, unsigned slot, uint64_t *position, uint64_t *released, enum ring_wait how,
                                  uint8_t *to)
{
    struct ring_record head;
    int result;
    while ((result = ring_look(h, *position, &head)) == RING_EMPTY) {
        if (*released != *position) ring_release(h, slot, *released = *position);
        ring_await(&h->shared->data, &h->shared->tail, *position, how, RING_NAP_NS);
    }
    must(!result && !ring_copy(h, *position, &head, to), "consume");
    *position += ring_padded(head.size);
    if (*position - *released >= h->size / 16) ring_release(h, slot, *released = *position);
    return head;
}

/* ---- threads ---- */

static struct ring_handle shared_handle;
static uint64_t each;
static pthread_barrier_t ready;

static struct ring_handle of_thread(void)
{
    struct ring_handle h = opened(shared_handle.locks, shared_handle.size), own = shared_handle;
    ring_unmap(&h); /* one mapping, so that the sanitizer sees one address for one byte; but locks of our own */
    own.locks = h.locks;
    own.joined = UINT32_MAX;
    own.mine = 0;
    return own;
}

static void *publisher(void *name)
{
    struct ring_handle h = of_thread();
    uint64_t body[40] = {(uint64_t)(uintptr_t)name};
    pthread_barrier_wait(&ready);
    for (uint64_t i = 0; i < each; i += 2) {
        struct ring_part parts[2];
        uint64_t bodies[2][40];
        for (unsigned k = 0; k < 2; k++) {
            body[1] = i + k;
            memcpy(bodies[k], body, sizeof body);
            parts[k] = (struct ring_part){NULL, bodies[k], 0, (uint32_t)(16 + (i + k) % 300), 1, 1, 0};
        }
        publish(&h, parts, 2);
    }
    close(h.locks);
    return NULL;
}

static void *consumer(void *unused)
{
    (void)unused;
    struct ring_handle h = of_thread();
    uint64_t position, released, following[PUBLISHERS] = {0}, body[64];
    unsigned slot = sit(&h, &position);
    released = position;
    pthread_barrier_wait(&ready);
    for (uint64_t i = 1; i <= PUBLISHERS * each; i++) {
        struct ring_record head = consume(&h, slot, &position, &released, WAIT_BLOCK, (uint8_t *)body);
        must(head.sequence == i && body[0] < PUBLISHERS && body[1] == following[body[0]]++, "order");
        must(head.size == 32 + 16 + body[1] % 300, "size");
    }
    ring_free_slot(&h, slot);
    close(h.locks);
    return NULL;
}

static void threads(uint64_t count)
{
    pthread_t all[PUBLISHERS + CONSUMERS];
    each = count;
    shared_handle = made(1 << 16);
    pthread_barrier_init(&ready, NULL, PUBLISHERS + CONSUMERS);
    for (unsigned i = 0; i < PUBLISHERS + CONSUMERS; i++)
        must(!pthread_create(&all[i], NULL, i < PUBLISHERS ? publisher : consumer, (void *)(uintptr_t)i), "thread");
    for (unsigned i = 0; i < PUBLISHERS + CONSUMERS; i++) pthread_join(all[i], NULL);
}

/* ---- seats ---- */

static pthread_mutex_t taking = PTHREAD_MUTEX_INITIALIZER; /* one thread at a time takes a seat; any frees one meanwhile */
static struct ring_handle other;                           /* with locks of its own: it sees those of the first handle */

static void *sitter(void *unused)
{
    (void)unused;
    uint64_t position;
    for (uint64_t i = 0; i < each; i++) {
        pthread_mutex_lock(&taking);
        unsigned slot = sit(&shared_handle, &position);
        pthread_mutex_unlock(&taking);
        must(ring_slot_alive(&other, slot), "a seat that was taken is not locked");
        ring_free_slot(&shared_handle, slot);
    }
    return NULL;
}

static void seats(uint64_t count)
{
    pthread_t all[3];
    each = count;
    shared_handle = made(1 << 16);
    other = opened(shared_handle.locks, shared_handle.size);
    for (unsigned i = 0; i < 3; i++) must(!pthread_create(&all[i], NULL, sitter, NULL), "thread");
    for (unsigned i = 0; i < 3; i++) pthread_join(all[i], NULL);
    must(!shared_handle.mine, "a seat is left");
    for (unsigned slot = 0; slot < RING_SLOTS; slot++) must(!ring_slot_alive(&other, slot), "a seat is still locked");
}

/* ---- noise ---- */

static uint64_t chance;

static uint64_t drawn(uint64_t below)
{
    chance ^= chance << 13;
    chance ^= chance >> 7;
    chance ^= chance << 17;
    return chance % below;
}

static void noise(uint64_t rounds)
{
    static const size_t hurts[] = {offsetof(struct ring, state), offsetof(struct ring, tail), offsetof(struct ring, slot),
                                   offsetof(struct ring, bound), RING_HEAD_BYTES};
    static const uint64_t edges[] = {0, 1, 7, 8, INT32_MAX, UINT64_C(1) << 31, UINT64_C(1) << 32, RING_POSITION_MOST,
                                     INT64_MAX, UINT64_C(1) << 63, UINT64_MAX - 7, UINT64_MAX, (1 << 16) - 8, (1 << 16) + 8};
    static uint8_t zeros[300];
    struct ring_part parts[3] = {{NULL, zeros, 0, 300, 1, 1, 0}, {zeros, zeros, 5, 7, 1, 3, 0}, {NULL, NULL, 0, 0, 1, 2, 0}};
    for (uint64_t round = 0; round < rounds; round++) {
        struct ring_handle h = made(1 << 16);
        uint64_t position, last, bytes;
        unsigned slot = sit(&h, &position);
        if (drawn(2)) ring_free_slot(&h, slot); /* the kept one is taken below */
        for (uint64_t i = drawn(300); i; i--) ring_publish(&h, parts, 3, 336 + 48 + 32, 0, &last);
        for (uint64_t i = drawn(8); i; i--) {
            uint64_t value = drawn(2) ? drawn(1 << 17) : drawn(2) ? edges[drawn(sizeof edges / sizeof *edges)] : chance;
            size_t word = drawn(3) ? hurts[drawn(5)] + drawn(8) * 8 : drawn(sizeof(struct ring) / 8) * 8;
            memcpy((uint8_t *)h.shared + word, &value, 8);
        }
        atomic_store(&h.shared->lock, 0);
        if (drawn(2)) ring_take_slot(&h, SLOT_KEPT, &position);
        for (unsigned turn = 0; turn < 40; turn++) {
            struct ring_record head;
            ring_publish(&h, parts, 3, 336 + 48 + 32, 0, &last);
            if (!ring_span(&h, position, drawn(100000), &bytes)) {
                uint8_t *copy = malloc(bytes);
                memcpy(copy, h.data + (position & (h.size - 1)), bytes);
                free(copy);
            }
            if (ring_look(&h, position, &head)) {
                position = drawn(2) ? atomic_load(&h.shared->tail) & ~UINT64_C(7) : drawn(1 << 18) & ~UINT64_C(7);
            } else {
                uint8_t *rest = malloc(head.size - sizeof head);
                ring_copy(&h, position, &head, rest);
                free(rest);
                position += ring_padded(head.size);
            }
            ring_release(&h, slot, position);
        }
        ring_reap(&h);
        ring_free_slot(&h, slot);
        close(h.locks);
        ring_unmap(&h);
    }
}

/* ---- bench ---- */

static struct ring_handle given(const char *text)
{
    struct stat stat;
    int fd = atoi(text);
    must(!fstat(fd, &stat), "fd");
    return opened(fd, (uint64_t)stat.st_size - RING_HEAD_BYTES);
}

static void copy(uint64_t count, size_t size)
{
    static uint8_t from[1 << 16], to[1 << 20];
    static _Atomic uint64_t tail;
    int64_t began = ring_clock(CLOCK_MONOTONIC);
    for (uint64_t i = 0; i < count; i++) {
        memcpy(to + (i * size & ((1 << 20) - 1) & ~(size - 1)), from, size);
        atomic_store_explicit(&tail, i, memory_order_release);
        __asm__ volatile("" ::: "memory");
    }
    printf("%.2f\n", (double)(ring_clock(CLOCK_MONOTONIC) - began) / (double)count);
}

int main(int argc, char **argv)
{
    crc_begin();
    must(argc > 2, "usage");
    uint64_t number = strtoull(argv[2], NULL, 10);
    if (!strcmp(argv[1], "threads")) {
        threads(number);
    } else if (!strcmp(argv[1], "seats")) {
        seats(number);
    } else if (!strcmp(argv[1], "noise") && argc > 3) {
        chance = strtoull(argv[3], NULL, 10) * 2 + 1;
        noise(number);
    } else if (!strcmp(argv[1], "copy") && argc > 3) {
        copy(number, strtoull(argv[3], NULL, 10));
    } else if (!strcmp(argv[1], "publish") && argc > 5) {
        static uint8_t zeros[1 << 16];
        struct ring_handle h = given(argv[2]);
        size_t batch = strtoull(argv[5], NULL, 10);
        struct ring_part *parts = calloc(batch, sizeof *parts);
        for (size_t i = 0; i < batch; i++) parts[i] = (struct ring_part){NULL, zeros, 0, (uint32_t)atoi(argv[4]), 1, 1, 0};
        for (uint64_t left = strtoull(argv[3], NULL, 10); left; left -= batch) publish(&h, parts, batch);
        free(parts);
    } else if (!strcmp(argv[1], "consume") && argc > 4) {
        static uint8_t to[1 << 16];
        struct ring_handle h = given(argv[2]);
        uint64_t position, released;
        unsigned slot = sit(&h, &position);
        released = position;
        puts("ready");
        fflush(stdout);
        for (uint64_t left = strtoull(argv[3], NULL, 10); left; left--)
            consume(&h, slot, &position, &released, (enum ring_wait)atoi(argv[4]), to);
        ring_free_slot(&h, slot);
    } else {
        must(0, "usage");
    }
    return 0;
}
