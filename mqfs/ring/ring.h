/* The layout of the ring's shared memory, defined only here; docs/explanation/ring.md explains it.
 *
 * A sealed memfd: this head, then `size` bytes of records as docs/reference/format.md has them. Each process maps the records twice,
 * one copy after the other, so that a record or a range that wraps is contiguous. A position counts bytes since the ring
 * was made and never wraps; it lies at position & (size - 1). Every process that has it mapped may write anything anywhere:
 * each value read from here is bounded before it is used, and no pointer is ever kept here.
 */
#ifndef MQFS_RING_H
#define MQFS_RING_H
#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include "../records/record.h"

#define RING_MAGIC "mqfsring"
#define RING_VERSION 2u
#define RING_HEAD_BYTES 65536u /* a multiple of every page size */
#define RING_SIZE_LEAST (UINT64_C(1) << 16)
#define RING_SIZE_MOST (UINT64_C(1) << 32)
#define RING_POSITION_MOST (UINT64_C(1) << 62) /* a position: centuries of publishing, and no sum with a size wraps */
#define RING_SLOTS 64u
#define RING_ALIGN 128 /* two cache lines: the CPU fetches them in pairs */

struct ring_fixed { /* written once, when the ring is made */
    char magic[8];
    uint32_t version, head_bytes;
    uint64_t size, generation;
    uint8_t boot[16];
    uint32_t slots, crc; /* CRC-32C of all before it */
};

struct ring_state { /* valid is the one whose `tail` is the ring's tail: so one store of tail changes all three */
    uint64_t tail, sequence; /* the sequence that the next message takes */
    int64_t time_ns;         /* of the last record */
};

struct ring_futex { /* a waiter sets `asleep`, re-checks, then waits on `word`; a writer checks `asleep` after its change */
    _Atomic uint32_t word, asleep;
};

enum ring_slot_state { SLOT_FREE, SLOT_FOLLOWS, SLOT_GATES, SLOT_KEPT }; /* kept: gates even when its consumer is dead */

struct ring_slot { /* one consumer; it holds an OFD lock on the memfd's byte of the slot's number */
    _Alignas(RING_ALIGN) _Atomic uint32_t state;
    _Atomic uint32_t pid;      /* for diagnosis */
    _Atomic uint64_t position; /* records below it are released */
};

struct ring {
    struct ring_fixed fixed;
    _Atomic uint32_t retired; /* nothing more may be published */
    _Atomic uint64_t final;   /* the log took the records below; UINT64_MAX: not known yet */
    _Alignas(RING_ALIGN) _Atomic uint32_t lock; /* futex: thread | FUTEX_WAITERS | FUTEX_OWNER_DIED */
    _Atomic uint32_t recovered;                 /* times the lock was found with its holder dead */
    _Atomic uint32_t joined;                    /* counts consumers that began to gate */
    _Atomic uint64_t bound;                     /* sequences below it may be used */
    struct ring_state state[2];                 /* by the holder of the lock */
    _Alignas(RING_ALIGN) _Atomic uint64_t tail; /* records below are published */
    _Atomic uint64_t reserved;                  /* the end of all writes ever begun; never decreases */
    _Alignas(RING_ALIGN) struct ring_futex data;
    _Alignas(RING_ALIGN) struct ring_futex space;
    _Alignas(RING_ALIGN) _Atomic uint64_t committed; /* messages up to this sequence are as durable as the group asks */
    struct ring_futex commit;
    struct ring_slot slot[RING_SLOTS]; /* 0 is the kept one's */
};

static_assert(sizeof(struct ring_record) == 32 && offsetof(struct ring_record, headers) == 30, "record as in the log");
static_assert(offsetof(struct ring_record, sequence) == 8 && offsetof(struct ring_record, stream) == 24, "record as in the log");
static_assert(sizeof(struct ring_fixed) == 56 && offsetof(struct ring_fixed, crc) == 52, "layout");
static_assert(offsetof(struct ring, retired) == 56 && offsetof(struct ring, final) == 64, "layout");
static_assert(offsetof(struct ring, lock) == 128 && offsetof(struct ring, bound) == 144, "layout");
static_assert(offsetof(struct ring, state) == 152 && offsetof(struct ring, tail) == 256, "layout");
static_assert(offsetof(struct ring, data) == 384 && offsetof(struct ring, space) == 512, "layout");
static_assert(offsetof(struct ring, committed) == 640 && offsetof(struct ring, commit) == 648, "layout");
static_assert(offsetof(struct ring, slot) == 768 && sizeof(struct ring_slot) == 128, "layout");
static_assert(sizeof(struct ring) <= RING_HEAD_BYTES, "fits the head");
static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "atomics work between processes");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the log is little-endian");
#endif
