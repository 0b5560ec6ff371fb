/* The ring's shared memory: the layout, and nowhere else; docs/explanation/ring.md explains it.
 *
 * A sealed memfd: this head, then `size` bytes of records as docs/reference/format.md has them. Each process maps the records twice,
 * one copy behind the other, so that a record or a range that wraps is contiguous. A position counts bytes since the ring
 * was made and never wraps; position & (size - 1) is where it lies. Whoever has it mapped may write anything anywhere:
 * what is read from here is bounded before it is used, and no pointer is ever kept here.
 */
#ifndef MQFS_RING_H
#define MQFS_RING_H
#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include "../log/record.h"

#define RING_MAGIC "mqfsring"
#define RING_VERSION 2u
#define RING_HEAD_BYTES 65536u /* a multiple of every page size */
#define RING_SIZE_LEAST (UINT64_C(1) << 16)
#define RING_SIZE_MOST (UINT64_C(1) << 32)
#define RING_POSITION_MOST (UINT64_C(1) << 62) /* of a position: centuries of publishing, and no sum with a size wraps */
#define RING_SEATS 64u
#define RING_ALIGN 128 /* two cache lines: the CPU fetches them in pairs */

struct ring_fixed { /* written once, when the ring is made */
    char magic[8];
    uint32_t version, head_bytes;
    uint64_t size, generation;
    uint8_t boot[16];
    uint32_t seats, crc; /* CRC-32C of all before it */
};

struct ring_state { /* that state counts whose `tail` is the ring's tail: so one store of tail changes all three */
    uint64_t tail, sequence; /* the sequence that the next message takes */
    int64_t time_ns;         /* of the last record */
};

struct ring_bell { /* who waits sets `asleep`, looks again, then sleeps on `word`; who changes something looks at `asleep` */
    _Atomic uint32_t word, asleep;
};

enum ring_seat_state { SEAT_FREE, SEAT_FOLLOWS, SEAT_GATES, SEAT_KEPT }; /* kept: gates even when its consumer is dead */

struct ring_seat { /* one consumer; it holds an OFD lock on the byte of the memfd that has the seat's number */
    _Alignas(RING_ALIGN) _Atomic uint32_t state;
    _Atomic uint32_t pid;      /* for people only */
    _Atomic uint64_t position; /* it is done with what is below */
};

struct ring {
    struct ring_fixed fixed;
    _Atomic uint32_t retired; /* its end has begun: nothing more is to be published */
    _Atomic uint64_t final;   /* up to here it was taken into the log, and no further; UINT64_MAX: not known yet */
    _Alignas(RING_ALIGN) _Atomic uint32_t lock; /* futex: thread | FUTEX_WAITERS | FUTEX_OWNER_DIED */
    _Atomic uint32_t recovered;                 /* times the lock was found with its holder dead */
    _Atomic uint32_t joined;                    /* counts consumers that began to gate */
    _Atomic uint64_t bound;                     /* sequences below it may be given */
    struct ring_state state[2];                 /* by the holder of the lock */
    _Alignas(RING_ALIGN) _Atomic uint64_t tail; /* published is what is below */
    _Atomic uint64_t reserved;                  /* as far as anybody ever began to write; never goes back */
    _Alignas(RING_ALIGN) struct ring_bell data;
    _Alignas(RING_ALIGN) struct ring_bell space;
    _Alignas(RING_ALIGN) _Atomic uint64_t committed; /* messages up to this sequence are as durable as the group asks */
    struct ring_bell commit;
    struct ring_seat seat[RING_SEATS]; /* 0 is the kept one's */
};

static_assert(sizeof(struct ring_record) == 32 && offsetof(struct ring_record, headers) == 30, "record as in the log");
static_assert(offsetof(struct ring_record, sequence) == 8 && offsetof(struct ring_record, stream) == 24, "record as in the log");
static_assert(sizeof(struct ring_fixed) == 56 && offsetof(struct ring_fixed, crc) == 52, "layout");
static_assert(offsetof(struct ring, retired) == 56 && offsetof(struct ring, final) == 64, "layout");
static_assert(offsetof(struct ring, lock) == 128 && offsetof(struct ring, bound) == 144, "layout");
static_assert(offsetof(struct ring, state) == 152 && offsetof(struct ring, tail) == 256, "layout");
static_assert(offsetof(struct ring, data) == 384 && offsetof(struct ring, space) == 512, "layout");
static_assert(offsetof(struct ring, committed) == 640 && offsetof(struct ring, commit) == 648, "layout");
static_assert(offsetof(struct ring, seat) == 768 && sizeof(struct ring_seat) == 128, "layout");
static_assert(sizeof(struct ring) <= RING_HEAD_BYTES, "fits the head");
static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "atomics work between processes");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the log is little-endian");
#endif
