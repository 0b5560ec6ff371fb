/* The ring without Python: lock, publishing, reading, waiting. Rare parts: core.c; layout: ring.h; reasons: docs/explanation/ring.md.
 *
 * Nothing here waits longer than its argument allows, allocates or calls back. One thread at a time publishes through a handle;
 * readers of the same handle may run beside it.
 */
#ifndef MQFS_RING_CORE_H
#define MQFS_RING_CORE_H
#include "../records/crc32c.h"
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

enum ring_result { RING_OK, RING_BUSY, RING_FULL, RING_BOUND, RING_LAGS, RING_EMPTY, RING_OVERTAKEN, RING_DAMAGED, RING_RETIRED };
enum ring_wait { WAIT_SPIN, WAIT_YIELD, WAIT_BLOCK };
/* Points where a test may stop or kill the process. */
enum ring_stop {
    STOP_NEVER, STOP_LOCKING, STOP_LOCKED, STOP_RESERVED, STOP_HALF, STOP_COPIED, STOP_STATED, STOP_PUBLISHED, STOP_UNLOCKED,
    STOP_WAKES, STOP_SLEEPS, STOP_READ, STOP_ATTACHED, STOPS
};

struct ring_handle {
    struct ring *shared;
    uint8_t *data;
    uint64_t size; /* our own copy: that in shared memory may change at any time */
    uint64_t limit; /* up to which the gating consumers last allowed writing */
    _Atomic uint64_t mine; /* bits of slots taken through this handle: its own OFD locks never conflict with it */
    uint64_t end;   /* after the last record published */
    uint64_t near;  /* up to which no follower that is waited for is overtaken, as last seen */
    uint64_t lost;  /* bits of the followers that are not waited for: they stood still, or were too slow */
    uint32_t joined;
    int waits; /* whether this publisher waits for followers */
    int locks; /* file descriptor of our own open file description, which holds the OFD locks */
};

struct ring_part {
    const void *headers, *body;
    uint32_t header_bytes, body_bytes, stream;
    uint8_t kind, flags;
};

/* core.c */
#pragma GCC visibility push(hidden)
extern int ring_stop_at, ring_stop_signal;
extern _Thread_local struct ring_self { uint32_t thread; struct robust_list_head *robust; } ring_self;

void ring_stop_here(void);
void ring_register_thread(void);
int ring_slot_alive(const struct ring_handle *h, unsigned slot);
void ring_reap(struct ring_handle *h);
int ring_take_slot(struct ring_handle *h, enum ring_slot_state state, uint64_t *position);
void ring_free_slot(struct ring_handle *h, unsigned slot);
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

/* ---- the lock: a robust futex. The kernel knows it by list_op_pending, in memory of our own; the list of a
 * pthread mutex would be pointers in shared memory, and following them would let any client write into the server. ---- */

static inline void ring_wake(struct ring_futex *futex)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (!atomic_load_explicit(&futex->asleep, memory_order_relaxed)) return;
    atomic_exchange(&futex->asleep, 0);
    RING_STOP(STOP_WAKES);
    atomic_fetch_add(&futex->word, 1);
    futex_wake(&futex->word, INT32_MAX);
}

static inline int64_t ring_clock(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Take the lock; with wait_ns 0 never sleep for it. Changes of the word by others do not extend the wait. */
static inline int ring_lock(struct ring *s, int64_t wait_ns)
{
    uint32_t waiters = 0;
    int64_t began = 0, left = wait_ns;
    if (!ring_self.thread) ring_register_thread();
    ring_self.robust->list_op_pending = (struct robust_list *)((char *)&s->lock - ring_self.robust->futex_offset);
    atomic_signal_fence(memory_order_seq_cst);
    RING_STOP(STOP_LOCKING);
    for (int turn = 0;; turn++) {
        uint32_t word = atomic_load_explicit(&s->lock, memory_order_relaxed);
        if (!(word & FUTEX_TID_MASK)) {
            if (!atomic_compare_exchange_weak(&s->lock, &word, ring_self.thread | waiters | (word & FUTEX_WAITERS))) continue;
            if (word & FUTEX_OWNER_DIED) { /* nothing to undo: it had not published. But it may have had to wake others */
                atomic_fetch_add(&s->recovered, 1);
                ring_wake(&s->data);
                ring_wake(&s->space);
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
    ring_self.robust->list_op_pending = NULL;
    return RING_BUSY;
}

static inline void ring_unlock(struct ring *s)
{
    if (atomic_exchange(&s->lock, 0) & FUTEX_WAITERS) futex_wake(&s->lock, 1);
    atomic_signal_fence(memory_order_seq_cst);
    ring_self.robust->list_op_pending = NULL;
}

/* ---- publishing ---- */

/* The position up to which nothing is overwritten that a gating consumer has not read. An impossible position does not gate. */
static inline uint64_t ring_limit(const struct ring_handle *h, uint64_t tail)
{
    uint64_t least = UINT64_MAX;
    for (unsigned i = 0; i < RING_SLOTS; i++) {
        struct ring_slot *slot = &h->shared->slot[i];
        if (atomic_load_explicit(&slot->state, memory_order_acquire) < SLOT_GATES) continue;
        uint64_t position = atomic_load_explicit(&slot->position, memory_order_acquire);
        if (tail - position <= h->size && position + h->size < least) least = position + h->size;
    }
    return least;
}

/* The position up to which no follower is overtaken that is waited for; a quarter of the ring on at most, or `total`, so that new
 * ones are noticed. One that was given up is waited for again when it has caught up to half the ring. */
static inline uint64_t ring_near(struct ring_handle *h, uint64_t tail, uint64_t total)
{
    uint64_t least = tail + (total > h->size / 4 ? total : h->size / 4);
    for (unsigned i = 0; i < RING_SLOTS; i++) {
        struct ring_slot *slot = &h->shared->slot[i];
        if (atomic_load_explicit(&slot->state, memory_order_acquire) != SLOT_FOLLOWS) continue;
        uint64_t position = atomic_load_explicit(&slot->position, memory_order_acquire), bit = UINT64_C(1) << i;
        if (tail - position <= h->size / 2) h->lost &= ~bit;
        if (!(h->lost & bit) && tail - position <= h->size && position + h->size < least) least = position + h->size;
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

/* `last` is the last sequence taken: a message or EOF marker takes the next, all others carry it. */
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
 * half the ring. The store of `tail` publishes; a process that dies before it has only raised `reserved`. */
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
    if (next.tail > h->near && h->waits && next.tail > (h->near = ring_near(h, now->tail, total))) {
        result = RING_LAGS;
        goto out;
    }
    if (atomic_load_explicit(&s->reserved, memory_order_relaxed) < next.tail)
        atomic_store_explicit(&s->reserved, next.tail, memory_order_relaxed);
    atomic_thread_fence(memory_order_release); /* no reader sees new bytes and an old `reserved` */
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
        ring_wake(&s->data);
    }
    return result;
}

/* ---- reading ---- */

/* Whether bytes read at `position` before this call may have been overwritten meanwhile. */
static inline int ring_overtaken(const struct ring_handle *h, uint64_t position)
{
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&h->shared->reserved, memory_order_relaxed) - position > h->size;
}

/* Where a retired ring ends for its readers: they do not see records that the log did not take. The server's consumer does. */
static inline int ring_end(const struct ring_handle *h, uint64_t position)
{
    uint64_t final = atomic_load(&h->shared->final);
    if (h->mine & 1) return RING_OK;
    return final == UINT64_MAX ? RING_EMPTY : position >= final ? RING_RETIRED : RING_OK;
}

/* The head of the record at `position`, with checked sizes: the whole record is below the tail. */
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

/* Copy the bytes after the head into `to`, and check the CRC of the record. */
static inline int ring_copy(const struct ring_handle *h, uint64_t position, const struct ring_record *head, void *to)
{
    size_t rest = head->size - sizeof *head;
    memcpy(to, h->data + (position & (h->size - 1)) + sizeof *head, rest);
    if (ring_overtaken(h, position)) return RING_OVERTAKEN;
    return ring_crc(head, to, rest) == head->crc ? RING_OK : RING_DAMAGED;
}

/* The bytes of whole records at `position`: at most `most`, and never more than the ring has, if there are several. A client may
 * move the tail as fast as this looks; from any position `size` bytes are mapped in one piece, and no more. */
static inline int ring_span(const struct ring_handle *h, uint64_t position, uint64_t most, uint64_t *bytes)
{
    struct ring_record head;
    int result = ring_look(h, position, &head);
    for (*bytes = 0; !result; result = ring_look(h, position + *bytes, &head)) {
        if (*bytes && *bytes + ring_padded(head.size) > (most < h->size ? most : h->size)) return RING_OK;
        *bytes += ring_padded(head.size);
    }
    return *bytes && result != RING_OVERTAKEN ? RING_OK : result;
}

static inline void ring_release(struct ring_handle *h, unsigned slot, uint64_t position)
{
    atomic_store_explicit(&h->shared->slot[slot].position, position, memory_order_release);
    ring_wake(&h->shared->space);
}

/* ---- waiting: each returns after a while at most, so that the caller can check for signals ---- */

#define RING_NAP_NS 50000000  /* a publisher may be killed between its last store and its wake-up */
#define RING_FULL_NS 10000000 /* and a dead consumer is found only by a check */

#ifndef RING_PAUSES
#define RING_PAUSES 32
#endif

static inline void ring_sleep(struct ring_futex *futex, _Atomic uint64_t *word, uint64_t seen, int64_t ns)
{
    uint32_t rung = atomic_load(&futex->word);
    atomic_store(&futex->asleep, 1);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load(word) != seen) return;
    RING_STOP(STOP_SLEEPS);
    futex_wait(&futex->word, rung, ns < RING_NAP_NS ? ns : RING_NAP_NS);
}

/* Wait until `word` is no longer `seen`, or for a while. */
static inline void ring_await(struct ring_futex *futex, _Atomic uint64_t *word, uint64_t seen, enum ring_wait how, int64_t ns)
{
    int turns = how == WAIT_SPIN ? 2000 : how == WAIT_YIELD ? 1000 : 32;
    /* Load seldom, and nothing else: each load takes the cache line from the publisher, and a close reader also those of
     * the record that is being written. */
    for (int turn = 0; turn < turns; turn++) {
        for (int pause = 0; pause < RING_PAUSES; pause++) ring_pause();
        if (atomic_load_explicit(word, memory_order_acquire) != seen) return;
        if (how == WAIT_YIELD) sched_yield();
    }
    if (how == WAIT_BLOCK) ring_sleep(futex, word, seen, ns);
}

/* Wait until `total` bytes may be written, or for a while; for an eighth of the ring at least, so that a full ring does not
 * pass on record by record. Wake-ups do not extend the wait: any process that is attached may wake it, as often as it likes. */
static inline void ring_await_room(struct ring_handle *h, uint64_t total, int64_t ns)
{
    struct ring *s = h->shared;
    uint64_t want = total > h->size / 8 ? total : h->size / 8;
    int64_t until = ring_clock(CLOCK_MONOTONIC) + (ns < RING_FULL_NS ? ns : RING_FULL_NS), left;
    for (int turn = 0;; turn++) {
        uint32_t rung = atomic_load(&s->space.word);
        if (turn >= 64) atomic_store(&s->space.asleep, 1);
        atomic_thread_fence(memory_order_seq_cst);
        uint64_t tail = atomic_load(&s->tail);
        if (ring_limit(h, tail) - tail >= want || atomic_load(&s->retired)) return;
        if (turn < 64) { ring_pause(); continue; }
        if ((left = until - ring_clock(CLOCK_MONOTONIC)) <= 0) return;
        if (futex_wait(&s->space.word, rung, left)) return;
    }
}

#define RING_GATE_NS 50000000  /* that a publisher waits for followers at most, before it overtakes them */
#define RING_STILL_NS 10000000 /* a follower that did not move for so long is not waited for */

/* Wait until the followers that would be overtaken leave room for `total` bytes, an eighth of the ring at least. Those that stand
 * still, or are too slow for that, are given up: they find what they miss in the log. So a follower that is stuck, stopped or dead
 * costs a publisher RING_STILL_NS once, and one that crawls on purpose RING_GATE_NS for each half of a ring. */
static inline void ring_await_followers(struct ring_handle *h, uint64_t total, int64_t most_ns)
{
    struct ring *s = h->shared;
    uint64_t want = total > h->size / 8 ? total : h->size / 8, seen[RING_SLOTS], behind;
    int64_t began = ring_clock(CLOCK_MONOTONIC), now = began, moved[RING_SLOTS];
    for (unsigned i = 0; i < RING_SLOTS; i++) seen[i] = atomic_load(&s->slot[i].position), moved[i] = began;
    for (int turn = 0;; turn++) {
        uint32_t rung = atomic_load(&s->space.word);
        if (turn >= 64) atomic_store(&s->space.asleep, 1);
        atomic_thread_fence(memory_order_seq_cst);
        uint64_t tail = atomic_load(&s->tail);
        behind = 0;
        for (unsigned i = 0; i < RING_SLOTS; i++) {
            uint64_t position = atomic_load(&s->slot[i].position), bit = UINT64_C(1) << i;
            if (atomic_load(&s->slot[i].state) != SLOT_FOLLOWS || h->lost & bit) continue;
            if (tail - position > h->size || tail - position + want <= h->size) continue;
            if (position != seen[i]) seen[i] = position, moved[i] = now;
            if (now - moved[i] < RING_STILL_NS) behind |= bit;
            else h->lost |= bit;
        }
        if (!behind || atomic_load(&s->retired)) return;
        if (now - began >= RING_GATE_NS) break;
        if (now - began >= most_ns) return;
        if (turn < 64) ring_pause();
        else futex_wait(&s->space.word, rung, RING_STILL_NS / 4);
        now = ring_clock(CLOCK_MONOTONIC);
    }
    h->lost |= behind;
}
#endif
