/* The ring without Python, its rare parts: slots, making and mapping; the state of the process and of its threads. */
#define _GNU_SOURCE
#include "core.h"

int ring_stop_at, ring_stop_signal;
_Thread_local struct ring_self ring_self;

void ring_stop_here(void)
{
    ring_stop_at = STOP_NEVER;
    kill(getpid(), ring_stop_signal);
}

void ring_register_thread(void)
{
    static _Thread_local struct robust_list_head own;
    size_t length;
    if (syscall(SYS_get_robust_list, 0, &ring_self.robust, &length) || !ring_self.robust) {
        own.list.next = &own.list;
        ring_self.robust = &own;
        syscall(SYS_set_robust_list, &own, sizeof own);
    }
    ring_self.thread = (uint32_t)syscall(SYS_gettid);
}

/* ---- consumer slots ---- */

static int ring_slot_lock(const struct ring_handle *h, unsigned slot, int command, short type)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)slot, .l_len = 1};
    return fcntl(h->locks, command, &lock) ? -1 : lock.l_type;
}

int ring_slot_alive(const struct ring_handle *h, unsigned slot)
{
    return (h->mine >> slot & 1) || ring_slot_lock(h, slot, F_OFD_GETLK, F_WRLCK) != F_UNLCK;
}

/* Free the slots of dead consumers. Needs the lock, as all changes of slots. */
void ring_reap(struct ring_handle *h)
{
    for (unsigned i = 0; i < RING_SLOTS; i++) {
        uint32_t state = atomic_load(&h->shared->slot[i].state);
        if (state != SLOT_FREE && state != SLOT_KEPT && !ring_slot_alive(h, i)) atomic_store(&h->shared->slot[i].state, SLOT_FREE);
    }
}

static int ring_position_fits(uint64_t position) { return !(position & 7) && position <= RING_POSITION_MOST; }

/* Take a slot at the tail; the kept one where it was left. Returns its number, or -1 (errno EBUSY: none is free; EINVAL: the
 * position is invalid). Needs the lock; the kept one does not, as a single process takes it. */
int ring_take_slot(struct ring_handle *h, enum ring_slot_state state, uint64_t *position)
{
    struct ring *s = h->shared;
    uint64_t tail = atomic_load(&s->tail);
    for (unsigned i = state != SLOT_KEPT; i < (state == SLOT_KEPT ? 1 : RING_SLOTS); i++) {
        if ((h->mine >> i & 1) || ring_slot_lock(h, i, F_OFD_SETLK, F_WRLCK) < 0) continue;
        uint64_t left = atomic_load(&s->slot[i].position);
        int resumes = state == SLOT_KEPT && atomic_load(&s->slot[i].state) == SLOT_KEPT && ring_position_fits(left);
        *position = resumes ? left : tail;
        if (!ring_position_fits(*position)) {
            ring_slot_lock(h, i, F_OFD_SETLK, F_UNLCK);
            errno = EINVAL;
            return -1;
        }
        atomic_fetch_or(&h->mine, UINT64_C(1) << i);
        atomic_store(&s->slot[i].position, *position);
        atomic_store(&s->slot[i].pid, (uint32_t)getpid());
        atomic_store(&s->slot[i].state, state);
        RING_STOP(STOP_ATTACHED);
        if (state >= SLOT_GATES) atomic_fetch_add(&s->joined, 1);
        return (int)i;
    }
    errno = EBUSY;
    return -1;
}

/* Free a slot; the kept one continues to gate for its next consumer. Needs no lock: no other process takes it before the OFD lock is
 * released, and no other thread of this handle, whose lock that is as well, before the bit is cleared. */
void ring_free_slot(struct ring_handle *h, unsigned slot)
{
    if (slot) atomic_store(&h->shared->slot[slot].state, SLOT_FREE);
    ring_slot_lock(h, slot, F_OFD_SETLK, F_UNLCK);
    atomic_fetch_and(&h->mine, ~(UINT64_C(1) << slot));
    ring_wake(&h->shared->space);
}

/* ---- making and attaching ---- */

/* Allocate all pages now, so that no later access fails. Returns an errno. */
int ring_allocate(int fd, uint64_t size)
{
    int error;
    do error = posix_fallocate(fd, 0, (off_t)(RING_HEAD_BYTES + size));
    while (error == EINTR);
    return error;
}

int ring_size_fits(uint64_t size)
{
    return size >= RING_SIZE_LEAST && size <= RING_SIZE_MOST && !(size & (size - 1));
}

/* Map `fd`, whose size was checked. A child does not inherit the mapping: it must attach itself. */
int ring_map(struct ring_handle *h, int fd, uint64_t size)
{
    size_t all = RING_HEAD_BYTES + 2 * (size_t)size;
    int access = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_FIXED | (size <= (UINT64_C(64) << 20) ? MAP_POPULATE : 0);
    uint8_t *at = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return -1;
    if (mmap(at, RING_HEAD_BYTES + size, access, flags, fd, 0) == MAP_FAILED ||
        mmap(at + RING_HEAD_BYTES + size, size, access, flags, fd, RING_HEAD_BYTES) == MAP_FAILED ||
        madvise(at, all, MADV_DONTFORK)) {
        int error = errno;
        munmap(at, all);
        errno = error;
        return -1;
    }
    *h = (struct ring_handle){.shared = (void *)at, .data = at + RING_HEAD_BYTES, .size = size, .joined = UINT32_MAX, .locks = fd};
    return 0;
}

void ring_unmap(struct ring_handle *h)
{
    munmap(h->shared, RING_HEAD_BYTES + 2 * (size_t)h->size);
    h->shared = NULL;
}

void ring_make(struct ring *s, uint64_t size, uint64_t generation, const uint8_t boot[16], uint64_t sequence, int64_t time_ns)
{
    struct ring_fixed fixed = {RING_MAGIC, RING_VERSION, RING_HEAD_BYTES, size, generation, {0}, RING_SLOTS, 0};
    memcpy(fixed.boot, boot, sizeof fixed.boot);
    fixed.crc = crc32c(0, &fixed, offsetof(struct ring_fixed, crc));
    s->state[0] = (struct ring_state){0, sequence, time_ns};
    s->state[1].tail = UINT64_MAX;
    atomic_store(&s->bound, UINT64_MAX);
    atomic_store(&s->final, UINT64_MAX);
    atomic_store(&s->committed, sequence - 1);
    s->fixed = fixed;
}

/* NULL, or the reason why the head of a file of `bytes` bytes is not that of a ring. */
const char *ring_check(const struct ring_fixed *fixed, uint64_t bytes, const uint8_t boot[16])
{
    if (memcmp(fixed->magic, RING_MAGIC, sizeof fixed->magic)) return "not a ring";
    if (fixed->version != RING_VERSION) return "a ring of another version";
    if (fixed->crc != crc32c(0, fixed, offsetof(struct ring_fixed, crc))) return "its head is corrupt";
    if (fixed->head_bytes != RING_HEAD_BYTES || fixed->slots != RING_SLOTS) return "a ring of another layout";
    if (!ring_size_fits(fixed->size) || fixed->size + RING_HEAD_BYTES != bytes) return "its size does not match its head";
    if (memcmp(fixed->boot, boot, sizeof fixed->boot)) return "a ring of an earlier boot";
    return NULL;
}
