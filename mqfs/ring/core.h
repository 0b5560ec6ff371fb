/* The ring without Python: lock, publishing, reading, waiting. What is rare: core.c. Layout: ring.h; why it holds: docs/explanation/ring.md.
 *
 * Nothing here waits longer than it is told, allocates or calls back. A handle is used by one thread at a time to publish;
 * readers of the same handle may run beside it.
 */
#ifndef MQFS_RING_CORE_H
#define MQFS_RING_CORE_H
#include "../log/crc32c.h"
#include "ring.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum ring_result { RING_OK, RING_BUSY, RING_FULL, RING_BOUND, RING_EMPTY, RING_OVERTAKEN, RING_DAMAGED, RING_RETIRED };
enum ring_wait { WAIT_SPIN, WAIT_YIELD, WAIT_BLOCK };
/* Where a test may stop or kill the process that comes by. */
enum ring_stop {
    STOP_NEVER, STOP_LOCKING, STOP_LOCKED, STOP_RESERVED, STOP_HALF, STOP_COPIED, STOP_STATED, STOP_PUBLISHED, STOP_UNLOCKED,
    STOP_RINGS, STOP_SLEEPS, STOP_READ, STOP_SEATED, STOPS
};

struct ring_handle {
    struct ring *shared;
    uint8_t *data;
    uint64_t size; /* our own copies: those in shared memory may change under us */
    uint64_t limit; /* as far as the gating consumers were last seen to let us write */
    uint64_t mine;  /* seats taken through this handle: its own OFD locks never conflict with it */
    uint64_t end;   /* behind what was published last */
    uint32_t joined;
    int locks; /* file descriptor of our own open file description, which holds the OFD locks */
};

struct ring_part {
    const void *headers, *body;
    uint32_t header_bytes, body_bytes, stream;
    uint8_t kind, flags;
};

/* core.c: what is rare, and the state of the process and of its threads. */
#pragma GCC visibility push(hidden)
extern int ring_stop_at, ring_stop_signal;
extern _Thread_local struct ring_me { uint32_t thread; struct robust_list_head *robust; } ring_me;

void ring_stop_here(void);
void ring_know_me(void);
int ring_seat_alive(const struct ring_handle *h, unsigned seat);
void ring_reap(struct ring_handle *h);
int ring_sit(struct ring_handle *h, enum ring_seat_state state, uint64_t *position);
void ring_leave(struct ring_handle *h, unsigned seat);
int ring_allocate(int fd, uint64_t size);
int ring_size_fits(uint64_t size);
int ring_map(struct ring_handle *h, int fd, uint64_t size);
void ring_unmap(struct ring_handle *h);
void ring_make(struct ring *s, uint64_t size, uint64_t generation, const uint8_t boot[16], uint64_t sequence, int64_t time_ns);
const char *ring_check(const struct ring_fixed *fixed, uint64_t bytes, const uint8_t boot[16]);
#pragma GCC visibility pop

#define RING_STOP(point) do { if (__builtin_expect(ring_stop_at == (point), 0)) ring_stop_here(); } while (0)

static inline void ring_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline uint64_t ring_padded(uint64_t size) { return (size + 7) & ~UINT64_C(7); }

static inline int futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t ns)
{
    struct timespec limit = {ns / 1000000000, ns % 1000000000};
    return (int)syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0);
}

static inline void futex_wake(_Atomic uint32_t *word, int most) { syscall(SYS_futex, word, FUTEX_WAKE, most, NULL, NULL, 0); }

/* ---- the lock: a robust futex. The kernel is told of it through list_op_pending, which is memory of our own; the list of a
 * pthread mutex would be pointers in shared memory, and following them lets any client write into the server. ---- */

static inline void ring_ring(struct ring_bell *bell)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (!atomic_load_explicit(&bell->asleep, memory_order_relaxed)) return;
    atomic_exchange(&bell->asleep, 0);
    RING_STOP(STOP_RINGS);
    atomic_fetch_add(&bell->word, 1);
    futex_wake(&bell->word, INT32_MAX);
}

static inline int64_t ring_clock(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Take the lock; with wait_ns 0 never sleep for it. Whoever keeps changing the word does not make it longer. */
static inline int ring_lock(struct ring *s, int64_t wait_ns)
{
    uint32_t waiters = 0;
    int64_t began = 0, left = wait_ns;
    if (!ring_me.thread) ring_know_me();
    ring_me.robust->list_op_pending = (struct robust_list *)((char *)&s->lock - ring_me.robust->futex_offset);
    atomic_signal_fence(memory_order_seq_cst);
    RING_STOP(STOP_LOCKING);
    for (int turn = 0;; turn++) {
        uint32_t word = atomic_load_explicit(&s->lock, memory_order_relaxed);
        if (!(word & FUTEX_TID_MASK)) {
            if (!atomic_compare_exchange_weak(&s->lock, &word, ring_me.thread | waiters | (word & FUTEX_WAITERS))) continue;
            if (word & FUTEX_OWNER_DIED) { /* nothing to undo: what it had not published is not there. But whom had it to wake? */
                atomic_fetch_add(&s->recovered, 1);
                ring_ring(&s->data);
                ring_ring(&s->space);
            }
            return RING_OK;
        }
        if (turn < 64) {
            ring_pause();
            continue;
        }
        if (left <= 0) break;
        if (!began) began = ring_clock(CLOCK_MONOTONIC);
        if (word & FUTEX_WAITERS || atomic_compare_exchange_weak(&s->lock, &word, word | FUTEX_WAITERS)) {
            waiters = FUTEX_WAITERS;
            if (futex_wait(&s->lock, word | FUTEX_WAITERS, left) && errno != EAGAIN) break;
        }
        left = wait_ns - (ring_clock(CLOCK_MONOTONIC) - began);
    }
    ring_me.robust->list_op_pending = NULL;
    return RING_BUSY;
}

static inline void ring_unlock(struct ring *s)
{
    if (atomic_exchange(&s->lock, 0) & FUTEX_WAITERS) futex_wake(&s->lock, 1);
    atomic_signal_fence(memory_order_seq_cst);
    ring_me.robust->list_op_pending = NULL;
}

/* ---- publishing ---- */

/* As far as may be written: no gating consumer still wants what would be overwritten. A position that cannot be is no gate. */
static inline uint64_t ring_limit(const struct ring_handle *h, uint64_t tail)
{
    uint64_t least = UINT64_MAX;
    for (unsigned i = 0; i < RING_SEATS; i++) {
        struct ring_seat *seat = &h->shared->seat[i];
        if (atomic_load_explicit(&seat->state, memory_order_acquire) < SEAT_GATES) continue;
        uint64_t position = atomic_load_explicit(&seat->position, memory_order_acquire);
        if (tail - position <= h->size && position + h->size < least) least = position + h->size;
    }
    return least;
}

static inline struct ring_state *ring_now(struct ring *s)
{
    uint64_t tail = atomic_load_explicit(&s->tail, memory_order_relaxed);
    return tail & 7 ? NULL : s->state[0].tail == tail ? &s->state[0] : s->state[1].tail == tail ? &s->state[1] : NULL;
}

static inline uint64_t ring_part_bytes(const struct ring_part *part)
{
    return ring_padded(sizeof(struct ring_record) + (uint64_t)part->header_bytes + part->body_bytes);
}

/* `last` is the last sequence taken: a message or end mark takes the next, all others carry it. */
static inline uint64_t ring_write(uint8_t *at, const struct ring_part *part, uint64_t last, int64_t time_ns)
{
    uint32_t size = (uint32_t)sizeof(struct ring_record) + part->header_bytes + part->body_bytes;
    struct ring_record head = {size, 0, last + (part->kind <= 2), time_ns, part->stream, part->kind, part->flags,
                               (uint16_t)part->header_bytes};
    uint8_t *body = at + sizeof head;
    memcpy(at, &head, sizeof head);
    if (part->header_bytes) memcpy(body, part->headers, part->header_bytes);
    RING_STOP(STOP_HALF);
    body += part->header_bytes;
    if (part->body_bytes) memcpy(body, part->body, part->body_bytes);
    memset(at + size, 0, ring_padded(size) - size);
    uint32_t crc = crc32c(crc32c(0, at, 4), at + 8, size - 8);
    memcpy(at + 4, &crc, 4);
    return head.sequence;
}

/* Reserve, copy and publish: all `count` records or, if the result is not RING_OK, none. `total`: their padded bytes, at most
 * half the ring. The store of `tail` is what publishes; a process that dies before it has done nothing but raise `reserved`. */
static inline int ring_publish(struct ring_handle *h, const struct ring_part *parts, size_t count, uint64_t total, int64_t wait_ns,
                        uint64_t *last)
{
    struct ring *s = h->shared;
    uint64_t next_end = 0;
    int result = ring_lock(s, wait_ns);
    if (result) return result;
    RING_STOP(STOP_LOCKED);
    struct ring_state *now = ring_now(s);
    if (!now || total > h->size / 2) { result = RING_DAMAGED; goto out; }
    if (atomic_load_explicit(&s->retired, memory_order_relaxed)) { result = RING_RETIRED; goto out; }
    struct ring_state next = {now->tail + total, now->sequence, ring_clock(CLOCK_REALTIME)};
    if (next.time_ns < now->time_ns) next.time_ns = now->time_ns;
    uint64_t bound = atomic_load_explicit(&s->bound, memory_order_relaxed), takes = 0;
    for (size_t i = 0; i < count; i++) takes += parts[i].kind <= 2;
    if (next.sequence > bound || takes > bound - next.sequence) { result = RING_BOUND; goto out; }
    uint32_t joined = atomic_load_explicit(&s->joined, memory_order_relaxed);
    if (next.tail > h->limit || joined != h->joined) {
        h->joined = joined;
        h->limit = ring_limit(h, now->tail);
        if (next.tail > h->limit) {
            ring_reap(h);
            h->limit = ring_limit(h, now->tail);
        }
        if (next.tail > h->limit) { result = RING_FULL; goto out; }
    }
    if (atomic_load_explicit(&s->reserved, memory_order_relaxed) < next.tail)
        atomic_store_explicit(&s->reserved, next.tail, memory_order_relaxed);
    atomic_thread_fence(memory_order_release); /* nobody sees new bytes and an old `reserved` */
    RING_STOP(STOP_RESERVED);
    uint64_t at = now->tail;
    *last = next.sequence - 1;
    for (size_t i = 0; i < count; at += ring_part_bytes(&parts[i++]))
        *last = ring_write(h->data + (at & (h->size - 1)), &parts[i], *last, next.time_ns);
    next.sequence = *last + 1;
    RING_STOP(STOP_COPIED);
    s->state[now == s->state] = next;
    RING_STOP(STOP_STATED);
    atomic_store_explicit(&s->tail, next_end = next.tail, memory_order_release);
    RING_STOP(STOP_PUBLISHED);
out:
    ring_unlock(s);
    RING_STOP(STOP_UNLOCKED);
    if (!result) {
        h->end = next_end;
        ring_ring(&s->data);
    }
    return result;
}

/* ---- reading ---- */

/* Whether what was read at `position` before this call may have been overwritten meanwhile. */
static inline int ring_overtaken(const struct ring_handle *h, uint64_t position)
{
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&h->shared->reserved, memory_order_relaxed) - position > h->size;
}

/* Where a retired ring ends for its readers: what the log did not take they do not see. The one that takes sees all. */
static inline int ring_end(const struct ring_handle *h, uint64_t position)
{
    uint64_t final = atomic_load(&h->shared->final);
    if (h->mine & 1) return RING_OK;
    return final == UINT64_MAX ? RING_EMPTY : position >= final ? RING_RETIRED : RING_OK;
}

/* The head of the record at `position`, with sizes that can be relied on: the whole record is below the tail. */
static inline int ring_look(const struct ring_handle *h, uint64_t position, struct ring_record *head)
{
    uint64_t tail = atomic_load_explicit(&h->shared->tail, memory_order_acquire), there = tail - position;
    if (atomic_load_explicit(&h->shared->retired, memory_order_acquire)) {
        int end = ring_end(h, position);
        if (end) return end;
    }
    if (!there) return RING_EMPTY;
    memcpy(head, h->data + (position & (h->size - 1)), sizeof *head);
    if (ring_overtaken(h, position)) return RING_OVERTAKEN;
    uint64_t size = head->size;
    if (there > h->size || there < sizeof *head || size < sizeof *head + head->headers) return RING_DAMAGED;
    return ring_padded(size) > there || size > h->size / 2 ? RING_DAMAGED : RING_OK;
}

static inline uint32_t ring_crc(const void *head, const void *rest, size_t rest_bytes)
{
    uint32_t crc = crc32c(0, head, 4);
    crc = crc32c(crc, (const uint8_t *)head + 8, sizeof(struct ring_record) - 8);
    return crc32c(crc, rest, rest_bytes);
}

/* What follows the head into `to`, checked: the copy is what was published, or the result says why not. */
static inline int ring_copy(const struct ring_handle *h, uint64_t position, const struct ring_record *head, void *to)
{
    size_t rest = head->size - sizeof *head;
    memcpy(to, h->data + (position & (h->size - 1)) + sizeof *head, rest);
    if (ring_overtaken(h, position)) return RING_OVERTAKEN;
    return ring_crc(head, to, rest) == head->crc ? RING_OK : RING_DAMAGED;
}

/* How many bytes of whole records, at most `most` if more than one, lie at `position`. */
static inline int ring_span(const struct ring_handle *h, uint64_t position, uint64_t most, uint64_t *bytes)
{
    struct ring_record head;
    int result = ring_look(h, position, &head);
    for (*bytes = 0; !result; result = ring_look(h, position + *bytes, &head)) {
        if (*bytes && *bytes + ring_padded(head.size) > most) return RING_OK;
        *bytes += ring_padded(head.size);
    }
    return *bytes && result != RING_OVERTAKEN ? RING_OK : result;
}

static inline void ring_release(struct ring_handle *h, unsigned seat, uint64_t position, int gates)
{
    atomic_store_explicit(&h->shared->seat[seat].position, position, memory_order_release);
    if (gates) ring_ring(&h->shared->space);
}

/* ---- waiting: each returns after a while at most, so that the caller can look for signals ---- */

#define RING_NAP_NS 50000000  /* a publisher may be killed between its last store and its wake-up */
#define RING_FULL_NS 10000000 /* and a dead consumer is found by who looks */

#ifndef RING_PAUSES
#define RING_PAUSES 32
#endif

static inline void ring_sleep(struct ring_bell *bell, _Atomic uint64_t *word, uint64_t seen, int64_t ns)
{
    uint32_t rung = atomic_load(&bell->word);
    atomic_store(&bell->asleep, 1);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(word) != seen) return;
    RING_STOP(STOP_SLEEPS);
    futex_wait(&bell->word, rung, ns < RING_NAP_NS ? ns : RING_NAP_NS);
}

/* Until `word` is no longer `seen`, or some time is over. */
static inline void ring_await(struct ring_bell *bell, _Atomic uint64_t *word, uint64_t seen, enum ring_wait how, int64_t ns)
{
    int turns = how == WAIT_SPIN ? 2000 : how == WAIT_YIELD ? 1000 : 32;
    /* Look seldom, and at nothing else: each look takes the line from the publisher, and a reader at its heels takes those
     * of the record that is being written besides. */
    for (int turn = 0; turn < turns; turn++) {
        for (int pause = 0; pause < RING_PAUSES; pause++) ring_pause();
        if (atomic_load_explicit(word, memory_order_acquire) != seen) return;
        if (how == WAIT_YIELD) sched_yield();
    }
    if (how == WAIT_BLOCK) ring_sleep(bell, word, seen, ns);
}

/* Until `total` bytes may be written, or some time is over. An eighth of the ring at once, so that a full ring is not handed
 * over record by record. */
static inline void ring_await_room(struct ring_handle *h, uint64_t total, int64_t ns)
{
    struct ring *s = h->shared;
    uint64_t want = total > h->size / 8 ? total : h->size / 8;
    for (int turn = 0;; turn++) {
        uint32_t rung = atomic_load(&s->space.word);
        if (turn >= 64) atomic_store(&s->space.asleep, 1);
        atomic_thread_fence(memory_order_seq_cst);
        uint64_t tail = atomic_load(&s->tail);
        if (ring_limit(h, tail) - tail >= want || atomic_load(&s->retired)) return;
        if (turn < 64) { ring_pause(); continue; }
        if (futex_wait(&s->space.word, rung, ns < RING_FULL_NS ? ns : RING_FULL_NS)) return;
    }
}
#endif
