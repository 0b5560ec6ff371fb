/* The ring without Python, what of it is rare: seats, making and mapping; the state of the process and of its threads. */
#define _GNU_SOURCE
#include "core.h"

int ring_stop_at, ring_stop_signal;
_Thread_local struct ring_me ring_me;

void ring_stop_here(void)
{
    ring_stop_at = STOP_NEVER;
    kill(getpid(), ring_stop_signal);
}

void ring_know_me(void)
{
    static _Thread_local struct robust_list_head own;
    size_t length;
    if (syscall(SYS_get_robust_list, 0, &ring_me.robust, &length) || !ring_me.robust) {
        own.list.next = &own.list;
        ring_me.robust = &own;
        syscall(SYS_set_robust_list, &own, sizeof own);
    }
    ring_me.thread = (uint32_t)syscall(SYS_gettid);
}

/* ---- seats ---- */

static int ring_seat_lock(const struct ring_handle *h, unsigned seat, int command, short type)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)seat, .l_len = 1};
    return fcntl(h->locks, command, &lock) ? -1 : lock.l_type;
}

int ring_seat_alive(const struct ring_handle *h, unsigned seat)
{
    return (h->mine >> seat & 1) || ring_seat_lock(h, seat, F_OFD_GETLK, F_WRLCK) != F_UNLCK;
}

/* Free the seats of dead consumers. With the lock held, as all changes of seats. */
void ring_reap(struct ring_handle *h)
{
    for (unsigned i = 0; i < RING_SEATS; i++) {
        uint32_t state = atomic_load(&h->shared->seat[i].state);
        if (state != SEAT_FREE && state != SEAT_KEPT && !ring_seat_alive(h, i)) atomic_store(&h->shared->seat[i].state, SEAT_FREE);
    }
}

static int ring_position_fits(uint64_t position) { return !(position & 7) && position <= RING_POSITION_MOST; }

/* Take a seat at the tail; the kept one where it was left, whatever the tail is. Returns its number, or -1 (errno EBUSY: none
 * is free; EINVAL: there is no place to begin at). Locked; the kept one needs no lock, as there is one process that takes it. */
int ring_sit(struct ring_handle *h, enum ring_seat_state state, uint64_t *position)
{
    struct ring *s = h->shared;
    uint64_t tail = atomic_load(&s->tail);
    for (unsigned i = state != SEAT_KEPT; i < (state == SEAT_KEPT ? 1 : RING_SEATS); i++) {
        if ((h->mine >> i & 1) || ring_seat_lock(h, i, F_OFD_SETLK, F_WRLCK) < 0) continue;
        uint64_t left = atomic_load(&s->seat[i].position);
        int resumes = state == SEAT_KEPT && atomic_load(&s->seat[i].state) == SEAT_KEPT && ring_position_fits(left);
        *position = resumes ? left : tail;
        if (!ring_position_fits(*position)) {
            ring_seat_lock(h, i, F_OFD_SETLK, F_UNLCK);
            errno = EINVAL;
            return -1;
        }
        h->mine |= UINT64_C(1) << i;
        atomic_store(&s->seat[i].position, *position);
        atomic_store(&s->seat[i].pid, (uint32_t)getpid());
        atomic_store(&s->seat[i].state, state);
        RING_STOP(STOP_SEATED);
        if (state >= SEAT_GATES) atomic_fetch_add(&s->joined, 1);
        return (int)i;
    }
    errno = EBUSY;
    return -1;
}

/* Leave a seat; the kept one goes on gating for whoever comes next. Needs no lock: the OFD lock goes last. */
void ring_leave(struct ring_handle *h, unsigned seat)
{
    if (seat) atomic_store(&h->shared->seat[seat].state, SEAT_FREE);
    h->mine &= ~(UINT64_C(1) << seat);
    ring_seat_lock(h, seat, F_OFD_SETLK, F_UNLCK);
    ring_ring(&h->shared->space);
}

/* ---- making and attaching ---- */

/* All its pages now: afterwards there is nothing left that could fail but the machine. Returns an errno. */
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

/* Map `fd`, whose size was checked. The memory is not inherited by a child: it must attach for itself. */
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
    struct ring_fixed fixed = {RING_MAGIC, RING_VERSION, RING_HEAD_BYTES, size, generation, {0}, RING_SEATS, 0};
    memcpy(fixed.boot, boot, sizeof fixed.boot);
    fixed.crc = crc32c(0, &fixed, offsetof(struct ring_fixed, crc));
    s->state[0] = (struct ring_state){0, sequence, time_ns};
    s->state[1].tail = UINT64_MAX;
    atomic_store(&s->bound, UINT64_MAX);
    atomic_store(&s->final, UINT64_MAX);
    atomic_store(&s->committed, sequence - 1);
    s->fixed = fixed;
}

/* NULL, or what is wrong with a head that was read from a ring of `bytes` bytes. */
const char *ring_check(const struct ring_fixed *fixed, uint64_t bytes, const uint8_t boot[16])
{
    if (memcmp(fixed->magic, RING_MAGIC, sizeof fixed->magic)) return "this is no ring";
    if (fixed->version != RING_VERSION) return "a ring of another version";
    if (fixed->crc != crc32c(0, fixed, offsetof(struct ring_fixed, crc))) return "its head is damaged";
    if (fixed->head_bytes != RING_HEAD_BYTES || fixed->seats != RING_SEATS) return "a ring of another layout";
    if (!ring_size_fits(fixed->size) || fixed->size + RING_HEAD_BYTES != bytes) return "its size is not the one it tells";
    if (memcmp(fixed->boot, boot, sizeof fixed->boot)) return "a ring of an earlier boot";
    return NULL;
}
