/* The ring for Python: objects, errors, waiting with signals. What it does in shared memory is in core.h. */
#define _GNU_SOURCE
#include <Python.h>
#include "core.h"
#include <pthread.h>
#include <stdio.h>

#ifndef SOURCE
#define SOURCE ""
#endif
#define LARGE_BYTES 65536  /* above it a copy lets other threads run */
#define PORTION_BYTES 262144 /* of a batch under one lock */
#define FOREVER INT64_MAX
#define ANSWER_NS INT64_C(5000000000)
#define FAST(function) ((PyCFunction)(void (*)(void))(function))

typedef struct Ring {
    PyObject_HEAD
    struct ring_handle h;
    int fd, publishes, users, forked; /* fd: a description without locks, to be passed on */
    uint64_t generation;
    struct Ring *following;
} Ring;

typedef struct {
    PyObject_HEAD
    Ring *ring;
    uint64_t position, released, last;
    int seat, gates, hold, busy, fell; /* fell: it was overtaken and is yet to be told */
    enum ring_wait how;
} Consumer;

static Ring *rings; /* all that are open, for a forked child */
static PyTypeObject *ring_type, *consumer_type;
static PyObject *again, *bad_ring, *busy, *damaged, *disconnected, *disk_full, *fell_behind, *over_limit, *stale;

static void after_fork(void) /* locks of a description that a child keeps open would outlive us */
{
    ring_me.thread = 0;
    for (Ring *ring = rings; ring; ring = ring->following) {
        close(ring->h.locks);
        close(ring->fd);
        ring->h.shared = NULL;
        ring->forked = 1;
    }
    rings = NULL;
}

static int usable(const Ring *ring)
{
    if (ring->h.shared) return 1;
    PyErr_SetString(stale, ring->forked ? "a child does not inherit the ring: attach to it again" : "the ring was closed");
    return 0;
}

static int64_t deadline(PyObject *timeout)
{
    if (!timeout || timeout == Py_None) return FOREVER;
    double seconds = PyFloat_AsDouble(timeout);
    if (seconds == -1.0 && PyErr_Occurred()) return -1;
    if (!(seconds > 0)) return 0;
    return seconds > 1e9 ? FOREVER : ring_clock(CLOCK_MONOTONIC) + (int64_t)(seconds * 1e9);
}

static int64_t remaining(int64_t until)
{
    if (until == FOREVER || until == 0) return until;
    int64_t left = until - ring_clock(CLOCK_MONOTONIC);
    return left > 0 ? left : 0;
}

static int arguments(const char *name, Py_ssize_t count, Py_ssize_t least, Py_ssize_t most)
{
    if (count >= least && count <= most) return 1;
    PyErr_Format(PyExc_TypeError, "%s() takes %zd to %zd arguments, not %zd", name, least, most, count);
    return 0;
}

static int number(PyObject *object, uint64_t most, uint64_t *value)
{
    *value = PyLong_AsUnsignedLongLong(object);
    if (*value == UINT64_MAX && PyErr_Occurred()) return 0;
    if (*value <= most) return 1;
    PyErr_SetString(PyExc_OverflowError, "number too large");
    return 0;
}

/* ---- publishing ---- */

static PyObject *as_bytes(PyObject *object)
{
    if (PyBytes_CheckExact(object)) return Py_NewRef(object);
    if (PyObject_CheckBuffer(object)) return PyBytes_FromObject(object);
    PyErr_SetString(PyExc_TypeError, "a bytes-like object is required");
    return NULL;
}

/* Point `part` at headers and body, which are bytes; its record's padded bytes, or 0 with an error set. */
static uint64_t fill(const Ring *ring, struct ring_part *part, uint64_t stream, uint64_t kind, PyObject *headers, PyObject *body)
{
    size_t head = headers ? (size_t)PyBytes_Size(headers) : 0, size = (size_t)PyBytes_Size(body);
    if (kind < 1 || kind > 6) return PyErr_SetString(PyExc_ValueError, "kind is 1 to 6"), UINT64_C(0);
    if (head > UINT16_MAX || size > ring->h.size / 2 - sizeof(struct ring_record) - head) {
        PyErr_Format(over_limit, "a record is at most half the ring (%llu bytes), its headers 65535 bytes",
                     (unsigned long long)ring->h.size / 2);
        return 0;
    }
    *part = (struct ring_part){headers ? PyBytes_AsString(headers) : NULL, PyBytes_AsString(body), (uint32_t)head,
                               (uint32_t)size, (uint32_t)stream, (uint8_t)kind, 0};
    return ring_part_bytes(part);
}

static int refuse(enum ring_result result)
{
    if (result == RING_BUSY) PyErr_SetString(again, "another holds the ring's lock");
    else if (result == RING_FULL) PyErr_SetString(again, "the ring is full: a consumer that gates is behind");
    else if (result == RING_BOUND) PyErr_SetString(again, "the sequences granted are used up");
    else if (result == RING_RETIRED) PyErr_SetString(stale, "a newer generation took the ring's place");
    else PyErr_SetString(bad_ring, "its state makes no sense");
    return -1;
}

/* The ring was retired about when we published: was it taken? Whoever retires it says so soon: we wait for that longer than
 * for room. */
static int ask_if_taken(Ring *ring, int64_t until)
{
    struct ring *s = ring->h.shared;
    int64_t least = ring_clock(CLOCK_MONOTONIC) + ANSWER_NS;
    if (until < least) until = least;
    uint64_t final;
    for (int64_t left; (final = atomic_load(&s->final)) == UINT64_MAX;) {
        if (!(left = remaining(until))) return PyErr_SetString(disconnected, "the ring's server has gone: whether it was taken is not known"), -1;
        Py_BEGIN_ALLOW_THREADS
        ring_await(&s->commit, &s->final, UINT64_MAX, WAIT_BLOCK, left);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals()) return -1;
    }
    return final >= ring->h.end ? 0 : refuse(RING_RETIRED);
}

static int put(Ring *ring, const struct ring_part *parts, size_t count, uint64_t total, int64_t until, uint64_t *last)
{
    struct ring_handle *h = &ring->h;
    for (int64_t left = 0;;) {
        int result;
        if (left || total >= LARGE_BYTES) {
            Py_BEGIN_ALLOW_THREADS
            result = ring_publish(h, parts, count, total, left < RING_NAP_NS ? left : RING_NAP_NS, last);
            Py_END_ALLOW_THREADS
        } else {
            result = ring_publish(h, parts, count, total, 0, last);
        }
        /* Who has the kept seat takes it, and is the one that would answer. */
        if (!result) return atomic_load(&h->shared->retired) && !(h->mine & 1) ? ask_if_taken(ring, until) : 0;
        /* Who stands still with the lock of a ring that was retired keeps nobody from the next one. */
        if (result == RING_BUSY && atomic_load(&h->shared->retired)) result = RING_RETIRED;
        left = remaining(until);
        if (result > RING_BOUND || !left) return refuse(result);
        Py_BEGIN_ALLOW_THREADS
        if (result == RING_FULL) ring_await_room(h, total, left);
        if (result == RING_BOUND)
            ring_await(&h->shared->commit, &h->shared->bound, atomic_load(&h->shared->bound), WAIT_BLOCK, left);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals()) return -1;
    }
}

static int claim(Ring *ring)
{
    if (!usable(ring)) return 0;
    if (ring->publishes) return PyErr_SetString(busy, "one thread at a time publishes through a handle: attach another"), 0;
    return ring->publishes = 1;
}

static PyObject *Ring_publish(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t stream, kind = 1, flags = 0, last;
    PyObject *headers = NULL, *body = NULL;
    struct ring_part part;
    if (!arguments("publish", count, 2, 6) || !number(args[0], UINT32_MAX, &stream)) return NULL;
    if ((count > 3 && !number(args[3], 255, &kind)) || (count > 4 && !number(args[4], 255, &flags))) return NULL;
    int64_t until = deadline(count > 5 ? args[5] : NULL);
    int failed = until < 0 || !(body = as_bytes(args[1])) || (count > 2 && !(headers = as_bytes(args[2]))) || !claim(self);
    if (!failed) {
        uint64_t total = fill(self, &part, stream, kind, headers, body);
        part.flags = (uint8_t)flags;
        failed = !total || put(self, &part, 1, total, until, &last);
        self->publishes = 0;
    }
    Py_XDECREF(headers);
    Py_XDECREF(body);
    return failed ? NULL : PyLong_FromUnsignedLongLong(last);
}

/* Say on the error that is set how many records were published before it. */
static void tell_published(Py_ssize_t count)
{
    PyObject *type, *error, *trace, *published = NULL;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (!(published = PyLong_FromSsize_t(count)) || PyObject_SetAttrString(error, "published", published)) PyErr_Clear();
    Py_XDECREF(published);
    PyErr_Restore(type, error, trace);
}

/* The records of parts, in portions; in one where they are a unit. */
static int put_all(Ring *ring, struct ring_part *parts, Py_ssize_t count, int unit, int64_t until, uint64_t *last)
{
    uint64_t portion = ring->h.size / 4 < PORTION_BYTES ? ring->h.size / 4 : PORTION_BYTES;
    for (Py_ssize_t from = 0, to = 0; to < count; from = to) {
        uint64_t total = 0;
        do total += ring_part_bytes(&parts[to++]);
        while (to < count && (unit || total + ring_part_bytes(&parts[to]) <= portion));
        if (total > ring->h.size / 2) return PyErr_SetString(over_limit, "a unit is at most half the ring"), -1;
        if (put(ring, parts + from, (size_t)(to - from), total, until, last)) return tell_published(from), -1;
    }
    return 0;
}

/* One draft (kind, stream, body[, headers]) into a part; what it points to is kept alive by `owners`. */
static int draft(const Ring *ring, PyObject *item, struct ring_part *part, PyObject *owners)
{
    uint64_t kind, stream;
    PyObject *body = NULL, *headers = NULL;
    Py_ssize_t size = PyTuple_Check(item) ? PyTuple_Size(item) : 0;
    if (size != 3 && size != 4) return PyErr_SetString(PyExc_TypeError, "a draft is (kind, stream, body, headers)"), 0;
    if (!number(PyTuple_GetItem(item, 0), 255, &kind) || !number(PyTuple_GetItem(item, 1), UINT32_MAX, &stream)) return 0;
    int done = (body = as_bytes(PyTuple_GetItem(item, 2))) && !PyList_Append(owners, body) &&
               (size == 3 || ((headers = as_bytes(PyTuple_GetItem(item, 3))) && !PyList_Append(owners, headers))) &&
               fill(ring, part, stream, kind, headers, body);
    Py_XDECREF(body);
    Py_XDECREF(headers);
    return done;
}

static PyObject *publish_items(Ring *self, PyObject *items, PyObject *timeout, int drafts, uint64_t stream, int unit, uint64_t flags)
{
    struct ring_part few[64], *parts = few;
    uint64_t last = 0;
    PyObject *all = NULL, *owners = NULL, *body;
    int64_t until = deadline(timeout);
    if (until < 0 || !usable(self) || !(all = PySequence_Tuple(items)) || !(owners = PyList_New(0))) goto failed;
    Py_ssize_t count = PyTuple_Size(all);
    if (count > 64 && !(parts = PyMem_Calloc((size_t)count, sizeof *parts))) { PyErr_NoMemory(); goto failed; }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GetItem(all, i);
        int filled = 0;
        if (drafts) {
            filled = draft(self, item, &parts[i], owners);
        } else if (PyBytes_CheckExact(item)) {
            filled = fill(self, &parts[i], stream, 1, NULL, item) != 0;
        } else if ((body = as_bytes(item))) {
            filled = !PyList_Append(owners, body) && fill(self, &parts[i], stream, 1, NULL, body);
            Py_DECREF(body);
        }
        if (!filled) goto failed;
        if (unit) parts[i].flags = (uint8_t)((uint64_t)((i + 1 < count) | (i ? 2 : 0)) | flags); /* MORE, INNER */
    }
    if (!claim(self)) goto failed;
    int result = put_all(self, parts, count, unit, until, &last);
    self->publishes = 0;
    if (result) goto failed;
    if (parts != few) PyMem_Free(parts);
    Py_DECREF(all);
    Py_DECREF(owners);
    return PyLong_FromUnsignedLongLong(last);
failed:
    if (parts != few) PyMem_Free(parts);
    Py_XDECREF(all);
    Py_XDECREF(owners);
    return NULL;
}

static PyObject *Ring_publish_many(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t stream;
    if (!arguments("publish_many", count, 2, 3) || !number(args[0], UINT32_MAX, &stream)) return NULL;
    return publish_items(self, args[1], count > 2 ? args[2] : NULL, 0, stream, 0, 0);
}

static PyObject *Ring_publish_drafts(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    if (!arguments("publish_drafts", count, 1, 2)) return NULL;
    return publish_items(self, args[0], count > 1 ? args[1] : NULL, 1, 0, 0, 0);
}

static PyObject *Ring_publish_unit(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t flags = 0;
    if (!arguments("publish_unit", count, 1, 3) || (count > 2 && !number(args[2], 255, &flags))) return NULL;
    return publish_items(self, args[0], count > 1 ? args[1] : NULL, 1, 0, 1, flags);
}

/* ---- consuming ---- */

static void settle(Consumer *self) /* let the publishers have what we are done with */
{
    if (self->released == self->position) return;
    ring_release(&self->ring->h, (unsigned)self->seat, self->position, self->gates);
    self->released = self->position;
}

static void advance(Consumer *self, const struct ring_record *head)
{
    self->position += ring_padded(head->size);
    self->last = head->sequence;
    if (self->hold) return;
    if (!self->gates || self->position - self->released >= self->ring->h.size / 16) settle(self);
}

static int fail(Consumer *self, enum ring_result result)
{
    if (result == RING_OVERTAKEN && !self->seat) result = RING_DAMAGED; /* publishers wait for the kept one: it stays where it is */
    if (result == RING_OVERTAKEN) {
        self->position = atomic_load(&self->ring->h.shared->tail) & ~UINT64_C(7);
        if (!self->hold) settle(self);
        PyErr_Format(fell_behind, "overtaken behind sequence %llu", (unsigned long long)self->last);
    } else if (result == RING_DAMAGED) {
        PyObject *error = PyObject_CallFunction(damaged, "Ks", (unsigned long long)self->last + 1,
                                                "what was published to the ring is no record");
        if (error) PyErr_SetObject(damaged, error);
        Py_XDECREF(error);
    } else {
        refuse(result);
    }
    return -1;
}

static int enter(Consumer *self)
{
    if (self->seat < 0) return PyErr_SetString(stale, "the consumer was closed"), 0;
    if (!usable(self->ring)) return 0;
    if (self->busy) return PyErr_SetString(busy, "one thread at a time reads through a consumer"), 0;
    self->ring->users++;
    return self->busy = 1;
}

static void leave(Consumer *self)
{
    self->busy = 0;
    self->ring->users--;
}

/* 1: the record whose head is in `head` is next; 0: none came in time; -1: error. */
static int await_head(Consumer *self, int64_t until, struct ring_record *head)
{
    struct ring_handle *h = &self->ring->h;
    if (self->fell) {
        self->fell = 0;
        return fail(self, RING_OVERTAKEN);
    }
    for (;;) {
        int result = ring_look(h, self->position, head);
        if (!result) return 1;
        if (!self->hold) settle(self);
        if (result != RING_EMPTY) return fail(self, (enum ring_result)result);
        int64_t left = remaining(until);
        if (!left) return 0;
        Py_BEGIN_ALLOW_THREADS
        if (atomic_load(&h->shared->retired)) ring_await(&h->shared->commit, &h->shared->final, UINT64_MAX, WAIT_BLOCK, left);
        else ring_await(&h->shared->data, &h->shared->tail, self->position, self->how, left);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals()) return -1;
    }
}

/* Headers and body of the record at our position, in one bytes object. */
static PyObject *copy_rest(Consumer *self, const struct ring_record *head)
{
    int result;
    PyObject *rest = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(head->size - sizeof *head));
    if (!rest) return NULL;
    void *to = PyBytes_AsString(rest);
    if (head->size >= LARGE_BYTES) {
        Py_BEGIN_ALLOW_THREADS
        result = ring_copy(&self->ring->h, self->position, head, to);
        Py_END_ALLOW_THREADS
    } else {
        result = ring_copy(&self->ring->h, self->position, head, to);
    }
    RING_STOP(STOP_READ);
    if (!result) return rest;
    Py_DECREF(rest);
    fail(self, (enum ring_result)result);
    return NULL;
}

static PyObject *part_of(PyObject *rest, size_t from, size_t to)
{
    if (!from && to == (size_t)PyBytes_Size(rest)) return Py_NewRef(rest);
    return PyBytes_FromStringAndSize(PyBytes_AsString(rest) + from, (Py_ssize_t)(to - from));
}

static PyObject *as_body(const struct ring_record *head, PyObject *rest)
{
    return part_of(rest, head->headers, head->size - sizeof *head);
}

static PyObject *as_record(const struct ring_record *head, PyObject *rest)
{
    PyObject *items[7] = {
        PyLong_FromUnsignedLongLong(head->sequence), PyLong_FromLongLong(head->time_ns), PyLong_FromUnsignedLong(head->stream),
        PyLong_FromLong(head->kind), PyLong_FromLong(head->flags), part_of(rest, 0, head->headers), as_body(head, rest)};
    PyObject *record = PyTuple_New(7);
    int failed = !record;
    for (int i = 0; i < 7; i++) {
        if (!items[i]) failed = 1;
        else if (!record) Py_DECREF(items[i]);
        else PyTuple_SetItem(record, i, items[i]);
    }
    if (failed) Py_CLEAR(record);
    return record;
}

typedef PyObject *(*shape_of)(const struct ring_record *, PyObject *);

/* The next record in that shape, NULL without an error if none came in time. Bodies are of messages only. */
static PyObject *take(Consumer *self, int64_t until, shape_of shape)
{
    struct ring_record head;
    for (int found; (found = await_head(self, until, &head)) > 0;) {
        if (shape == as_body && head.kind != 1) { advance(self, &head); continue; }
        PyObject *rest = copy_rest(self, &head), *result = rest ? shape(&head, rest) : NULL;
        Py_XDECREF(rest);
        if (result) advance(self, &head);
        return result;
    }
    return NULL;
}

static PyObject *take_one(Consumer *self, PyObject *const *args, Py_ssize_t count, const char *name, shape_of shape)
{
    if (!arguments(name, count, 0, 1)) return NULL;
    int64_t until = deadline(count ? args[0] : NULL);
    if (until < 0 || !enter(self)) return NULL;
    PyObject *result = take(self, until, shape);
    leave(self);
    return result || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}

static PyObject *take_many(Consumer *self, PyObject *const *args, Py_ssize_t count, const char *name, shape_of shape)
{
    uint64_t most;
    PyObject *all = NULL, *one;
    if (!arguments(name, count, 1, 2) || !number(args[0], PY_SSIZE_T_MAX, &most)) return NULL;
    int64_t until = deadline(count > 1 ? args[1] : NULL);
    if (until < 0 || !(all = PyList_New(0)) || !enter(self)) return Py_XDECREF(all), NULL;
    while (most && (one = take(self, until, shape))) {
        int failed = PyList_Append(all, one);
        Py_DECREF(one);
        if (failed) break;
        most--;
        until = 0;
    }
    leave(self);
    if (!PyErr_Occurred()) return all;
    int fell = PyErr_ExceptionMatches(fell_behind);
    if (PyList_Size(all) && (fell || PyErr_ExceptionMatches(damaged) || PyErr_ExceptionMatches(stale))) {
        PyErr_Clear(); /* what was taken before is not lost: the next call meets the condition again */
        self->fell = fell;
        return all;
    }
    Py_DECREF(all);
    return NULL;
}

static PyObject *Consumer_body(Consumer *self, PyObject *const *args, Py_ssize_t count)
{
    return take_one(self, args, count, "body", as_body);
}

static PyObject *Consumer_record(Consumer *self, PyObject *const *args, Py_ssize_t count)
{
    return take_one(self, args, count, "record", as_record);
}

static PyObject *Consumer_bodies(Consumer *self, PyObject *const *args, Py_ssize_t count)
{
    return take_many(self, args, count, "bodies", as_body);
}

static PyObject *Consumer_records(Consumer *self, PyObject *const *args, Py_ssize_t count)
{
    return take_many(self, args, count, "records", as_record);
}

static PyObject *Consumer_range(Consumer *self, PyObject *const *args, Py_ssize_t count)
{
    struct ring_handle *h = &self->ring->h;
    struct ring_record head;
    uint64_t most, bytes = 0;
    if (!arguments("range", count, 1, 2) || !number(args[0], UINT64_MAX, &most)) return NULL;
    int64_t until = deadline(count > 1 ? args[1] : NULL);
    if (until < 0 || !enter(self)) return NULL;
    PyObject *range = NULL;
    int found = await_head(self, until, &head), result = found > 0 ? ring_span(h, self->position, most, &bytes) : RING_OK;
    if (found > 0 && !result && (range = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes))) {
        void *to = PyBytes_AsString(range);
        Py_BEGIN_ALLOW_THREADS
        memcpy(to, h->data + (self->position & (h->size - 1)), bytes);
        result = ring_overtaken(h, self->position) ? RING_OVERTAKEN : RING_OK;
        Py_END_ALLOW_THREADS
    }
    if (result) {
        Py_CLEAR(range);
        fail(self, (enum ring_result)result);
    } else if (range) {
        self->position += bytes;
        if (!self->hold) settle(self);
    }
    leave(self);
    return range || PyErr_Occurred() ? range : Py_NewRef(Py_None);
}

static PyObject *Consumer_release(Consumer *self, PyObject *nothing)
{
    (void)nothing;
    if (!enter(self)) return NULL;
    settle(self);
    leave(self);
    Py_RETURN_NONE;
}

static PyObject *Consumer_skip(Consumer *self, PyObject *nothing)
{
    (void)nothing;
    if (!enter(self)) return NULL;
    self->position = atomic_load(&self->ring->h.shared->tail) & ~UINT64_C(7);
    settle(self);
    leave(self);
    Py_RETURN_NONE;
}

static void stand_up(Consumer *self)
{
    if (self->seat >= 0 && self->ring->h.shared) {
        if (!self->hold) settle(self);
        ring_leave(&self->ring->h, (unsigned)self->seat);
    }
    self->seat = -1;
}

static PyObject *Consumer_close(Consumer *self, PyObject *nothing)
{
    (void)nothing;
    if (self->busy) return PyErr_SetString(busy, "another thread reads through the consumer"), NULL;
    stand_up(self);
    Py_RETURN_NONE;
}

static PyObject *Consumer_get(Consumer *self, void *what)
{
    if (what == (void *)0) return PyLong_FromLong(self->seat);
    if (what == (void *)1) return PyLong_FromUnsignedLongLong(self->position);
    return PyLong_FromUnsignedLongLong(self->last);
}

static void Consumer_dealloc(PyObject *object)
{
    Consumer *self = (Consumer *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->ring) stand_up(self);
    Py_XDECREF((PyObject *)self->ring);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *Ring_consumer(Ring *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"gates", "kept", "hold", "wait", NULL};
    static const char *const ways[] = {"spin", "yield", "block"};
    int gates = 0, kept = 0, hold = 0, how = 0, result = RING_BUSY, seat = -1, error = 0;
    const char *way = "block";
    uint64_t position = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$ppps", names, &gates, &kept, &hold, &way)) return NULL;
    while (how < 3 && strcmp(way, ways[how])) how++;
    if (how == 3) return PyErr_SetString(PyExc_ValueError, "wait is spin, yield or block"), NULL;
    if (!claim(self)) return NULL;
    enum ring_seat_state state = kept ? SEAT_KEPT : gates ? SEAT_GATES : SEAT_FOLLOWS;
    if (kept) { /* however long another has the lock */
        result = RING_OK;
        seat = ring_sit(&self->h, state, &position);
        error = errno;
    }
    while (result == RING_BUSY) {
        Py_BEGIN_ALLOW_THREADS
        if (!(result = ring_lock(self->h.shared, RING_NAP_NS))) {
            seat = ring_sit(&self->h, state, &position);
            error = errno;
            ring_unlock(self->h.shared);
        } else if (atomic_load(&self->h.shared->retired)) {
            result = RING_RETIRED;
        }
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals()) break;
    }
    self->publishes = 0;
    if (seat < 0 && !PyErr_Occurred()) {
        if (result) refuse((enum ring_result)result);
        else if (error == EINVAL) refuse(RING_DAMAGED);
        else PyErr_SetString(busy, "no seat is free in the ring");
    }
    if (seat < 0) return NULL;
    Consumer *consumer = PyErr_Occurred() ? NULL : PyObject_New(Consumer, consumer_type);
    if (!consumer) return ring_leave(&self->h, (unsigned)seat), NULL;
    consumer->ring = (Ring *)Py_NewRef((PyObject *)self);
    consumer->position = consumer->released = position;
    consumer->last = 0;
    consumer->seat = seat;
    consumer->gates = gates || kept;
    consumer->hold = hold;
    consumer->busy = consumer->fell = 0;
    consumer->how = (enum ring_wait)how;
    return (PyObject *)consumer;
}

/* ---- the rest of a ring ---- */

static PyObject *Ring_wait_committed(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t sequence, seen;
    if (!arguments("wait_committed", count, 1, 2) || !number(args[0], UINT64_MAX, &sequence)) return NULL;
    int64_t until = deadline(count > 1 ? args[1] : NULL), left = 1;
    if (until < 0 || !usable(self)) return NULL;
    struct ring *s = self->h.shared;
    self->users++;
    while ((seen = atomic_load(&s->committed)) < sequence && (left = remaining(until))) {
        Py_BEGIN_ALLOW_THREADS
        ring_await(&s->commit, &s->committed, seen, WAIT_BLOCK, left);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals()) break;
    }
    self->users--;
    return PyErr_Occurred() ? NULL : PyBool_FromLong(seen >= sequence);
}

static PyObject *store_word(Ring *self, PyObject *value, size_t at)
{
    uint64_t sequence;
    if (!usable(self) || !number(value, UINT64_MAX, &sequence)) return NULL;
    atomic_store((_Atomic uint64_t *)(void *)((char *)self->h.shared + at), sequence);
    ring_ring(&self->h.shared->commit);
    Py_RETURN_NONE;
}

static PyObject *Ring_commit(Ring *self, PyObject *value) { return store_word(self, value, offsetof(struct ring, committed)); }
static PyObject *Ring_grant(Ring *self, PyObject *value) { return store_word(self, value, offsetof(struct ring, bound)); }

static void ring_all(struct ring *s)
{
    ring_ring(&s->data);
    ring_ring(&s->space);
    ring_ring(&s->commit);
}

/* Whether nobody is inside any more: who comes now sees that the ring is retired. */
static PyObject *Ring_retire(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    if (!arguments("retire", count, 0, 1)) return NULL;
    int64_t until = deadline(count ? args[0] : NULL);
    if (until < 0 || !claim(self)) return NULL;
    struct ring *s = self->h.shared;
    int result;
    atomic_store(&s->retired, 1);
    Py_BEGIN_ALLOW_THREADS
    ring_all(s);
    if (!(result = ring_lock(s, remaining(until)))) ring_unlock(s);
    Py_END_ALLOW_THREADS
    self->publishes = 0;
    return PyBool_FromLong(!result);
}

static PyObject *Ring_end(Ring *self, PyObject *position)
{
    uint64_t final;
    if (!usable(self) || !number(position, UINT64_MAX - 1, &final)) return NULL;
    atomic_store(&self->h.shared->final, final);
    ring_all(self->h.shared);
    Py_RETURN_NONE;
}

static PyObject *Ring_wait(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t seen;
    if (!arguments("wait", count, 1, 2) || !number(args[0], UINT64_MAX, &seen)) return NULL;
    int64_t until = deadline(count > 1 ? args[1] : NULL), left;
    if (until < 0 || !usable(self)) return NULL;
    struct ring *s = self->h.shared;
    self->users++;
    while (atomic_load(&s->tail) == seen && !atomic_load(&s->retired) && (left = remaining(until))) {
        Py_BEGIN_ALLOW_THREADS
        ring_await(&s->data, &s->tail, seen, WAIT_BLOCK, left);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals()) break;
    }
    self->users--;
    return PyErr_Occurred() ? NULL : PyBool_FromLong(atomic_load(&s->tail) != seen);
}

static PyObject *Ring_seats(Ring *self, PyObject *nothing)
{
    (void)nothing;
    PyObject *all = usable(self) ? PyList_New(0) : NULL;
    for (unsigned i = 0; all && i < RING_SEATS; i++) {
        struct ring_seat *seat = &self->h.shared->seat[i];
        uint32_t state = atomic_load(&seat->state);
        if (state == SEAT_FREE) continue;
        PyObject *row = Py_BuildValue("IIKOO", i, atomic_load(&seat->pid), (unsigned long long)atomic_load(&seat->position),
                                      state >= SEAT_GATES ? Py_True : Py_False, ring_seat_alive(&self->h, i) ? Py_True : Py_False);
        if (!row || PyList_Append(all, row)) Py_CLEAR(all);
        Py_XDECREF(row);
    }
    return all;
}

static PyObject *Ring_fileno(Ring *self, PyObject *nothing)
{
    (void)nothing;
    return usable(self) ? PyLong_FromLong(self->fd) : NULL;
}

static void close_ring(Ring *self)
{
    if (!self->h.shared) return;
    for (Ring **at = &rings; *at; at = &(*at)->following)
        if (*at == self) { *at = self->following; break; }
    ring_unmap(&self->h);
    close(self->h.locks);
    close(self->fd);
}

static PyObject *Ring_close(Ring *self, PyObject *nothing)
{
    (void)nothing;
    if (self->users || self->publishes) return PyErr_SetString(busy, "another thread uses the ring"), NULL;
    close_ring(self);
    Py_RETURN_NONE;
}

static void Ring_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    close_ring((Ring *)object);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *Ring_get(Ring *self, void *what)
{
    if (!usable(self)) return NULL;
    struct ring *s = self->h.shared;
    switch ((intptr_t)what) {
    case 0: return PyLong_FromUnsignedLongLong(self->h.size);
    case 1: return PyLong_FromUnsignedLongLong(self->generation);
    case 2: return PyLong_FromUnsignedLongLong(atomic_load(&s->tail));
    case 3: return PyLong_FromUnsignedLongLong(atomic_load(&s->committed));
    case 4: return PyLong_FromUnsignedLong(atomic_load(&s->recovered));
    case 6: return PyLong_FromUnsignedLong(atomic_load(&s->lock) & FUTEX_TID_MASK);
    case 8: {
        struct ring_state *now = ring_now(s);
        return PyLong_FromUnsignedLongLong(now ? now->sequence : 0);
    }
    case 7: return atomic_load(&s->final) == UINT64_MAX ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(atomic_load(&s->final));
    default: return PyBool_FromLong(atomic_load(&s->retired) != 0);
    }
}

/* ---- making and attaching ---- */

static int boot_id(uint8_t boot[16])
{
    char text[37] = {0};
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC), digits = 0;
    ssize_t got = fd < 0 ? -1 : read(fd, text, 36);
    if (fd >= 0) close(fd);
    memset(boot, 0, 16);
    for (int i = 0; i < got && digits < 32; i++) {
        int digit = text[i] >= '0' && text[i] <= '9' ? text[i] - '0' : text[i] >= 'a' && text[i] <= 'f' ? text[i] - 'a' + 10 : -1;
        if (digit < 0) continue;
        boot[digits / 2] = (uint8_t)(boot[digits / 2] << 4 | digit);
        digits++;
    }
    return digits == 32 || (PyErr_SetString(bad_ring, "/proc/sys/kernel/random/boot_id cannot be read"), 0);
}

/* A ring object that owns `fd`. Of `size` bytes; its locks are on an open file description that no other process has. */
static Ring *open_ring(int fd, uint64_t size)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    struct ring_handle h;
    int locks = open(path, O_RDWR | O_CLOEXEC);
    if (locks < 0 || ring_map(&h, locks, size)) {
        PyErr_SetFromErrno(PyExc_OSError);
        if (locks >= 0) close(locks);
        close(fd);
        return NULL;
    }
    Ring *ring = PyObject_New(Ring, ring_type);
    if (!ring) {
        ring_unmap(&h);
        close(locks);
        close(fd);
        return NULL;
    }
    ring->h = h;
    ring->fd = fd;
    ring->publishes = ring->users = ring->forked = 0;
    ring->following = rings;
    rings = ring;
    return ring;
}

static PyObject *allocate(int fd, uint64_t size)
{
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = ring_allocate(fd, size);
    Py_END_ALLOW_THREADS
    if (!error) Py_RETURN_NONE;
    errno = error;
    if (error == ENOSPC || error == EFBIG || error == ENOMEM) PyErr_SetString(disk_full, "no memory for the ring");
    else PyErr_SetFromErrno(PyExc_OSError);
    return NULL;
}

static PyObject *native_create(PyObject *module, PyObject *args, PyObject *keywords)
{
    (void)module;
    static char *names[] = {"size", "generation", "sequence", "time_ns", NULL};
    unsigned long long size, generation = 1, sequence = 1;
    long long time_ns = 0;
    uint8_t boot[16];
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "K|$KKL", names, &size, &generation, &sequence, &time_ns)) return NULL;
    if (!ring_size_fits(size)) return PyErr_SetString(bad_ring, "its size is a power of two from 64 KiB to 4 GiB"), NULL;
    if (!sequence || !boot_id(boot)) return PyErr_Occurred() ? NULL : (PyErr_SetString(bad_ring, "sequences begin at 1"), NULL);
    int fd = (int)syscall(SYS_memfd_create, "mqfs-ring", 1u | 2u); /* MFD_CLOEXEC | MFD_ALLOW_SEALING */
    if (fd < 0) return PyErr_SetFromErrno(PyExc_OSError);
    PyObject *done = allocate(fd, size);
    if (!done || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
        if (done) PyErr_SetFromErrno(PyExc_OSError);
        Py_XDECREF(done);
        close(fd);
        return NULL;
    }
    Py_DECREF(done);
    Ring *ring = open_ring(fd, size);
    if (!ring) return NULL;
    ring->generation = generation;
    ring_make(ring->h.shared, size, generation, boot, sequence, time_ns);
    return (PyObject *)ring;
}

static PyObject *native_attach(PyObject *module, PyObject *args, PyObject *keywords)
{
    (void)module;
    static char *names[] = {"fd", "generation", NULL};
    PyObject *wanted = Py_None;
    struct ring_fixed fixed;
    struct stat stat;
    uint8_t boot[16];
    uint64_t generation = 0;
    int given;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "i|O", names, &given, &wanted) || !boot_id(boot)) return NULL;
    if (wanted != Py_None && !number(wanted, UINT64_MAX, &generation)) return NULL;
    int seals = fcntl(given, F_GET_SEALS), must = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (seals < 0 && errno == EBADF) return PyErr_SetFromErrno(PyExc_OSError);
    if (seals < 0 || (seals & must) != must) return PyErr_SetString(bad_ring, "it is not sealed"), NULL;
    if (fstat(given, &stat)) return PyErr_SetFromErrno(PyExc_OSError);
    if (pread(given, &fixed, sizeof fixed, 0) != sizeof fixed) return PyErr_SetString(bad_ring, "it is too short"), NULL;
    const char *wrong = ring_check(&fixed, (uint64_t)stat.st_size, boot);
    if (wrong) return PyErr_SetString(bad_ring, wrong), NULL;
    if (wanted != Py_None && generation != fixed.generation) return PyErr_SetString(stale, "another generation of the ring"), NULL;
    int fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return PyErr_SetFromErrno(PyExc_OSError);
    Ring *ring = open_ring(fd, fixed.size);
    if (ring) ring->generation = fixed.generation;
    return (PyObject *)ring;
}

/* ---- buffers of records ---- */

enum { SEQUENCE, TIME, POSITION, BODY, STREAM, HEADERS, KIND, FLAGS, COLUMNS };
static const size_t widths[COLUMNS] = {8, 8, 4, 4, 4, 2, 1, 1};

/* The head of the record at `at` if it lies whole in the buffer. */
static int whole(const uint8_t *data, size_t bytes, size_t at, struct ring_record *head)
{
    if (bytes - at < sizeof *head) return 0;
    memcpy(head, data + at, sizeof *head);
    return head->size >= sizeof *head + head->headers && ring_padded(head->size) <= bytes - at && head->kind >= 1 && head->kind <= 6;
}

static size_t count_whole(const uint8_t *data, size_t bytes)
{
    struct ring_record head;
    size_t count = 0;
    for (size_t at = 0; whole(data, bytes, at, &head); at += ring_padded(head.size)) count++;
    return count;
}

/* Fill the columns; returns how many records passed and, in `end`, where the next would begin. */
static size_t index_records(const uint8_t *data, size_t bytes, size_t most, uint64_t base, uint8_t **to, size_t *end)
{
    struct ring_record head;
    size_t at = 0, row = 0;
    for (; row < most && whole(data, bytes, at, &head); row++, at += ring_padded(head.size)) {
        if (ring_crc(&head, data + at + sizeof head, head.size - sizeof head) != head.crc) break;
        uint32_t position = (uint32_t)(base + at);
        uint32_t body = head.size - (uint32_t)sizeof head - head.headers;
        const void *from[COLUMNS] = {&head.sequence, &head.time_ns, &position, &body, &head.stream, &head.headers,
                                     &head.kind, &head.flags};
        for (int i = 0; i < COLUMNS; i++) memcpy(to[i] + row * widths[i], from[i], widths[i]);
    }
    *end = at;
    return row;
}

static PyObject *native_scan(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Py_buffer view;
    uint64_t base = 0;
    if (!arguments("scan", count, 1, 2) || (count > 1 && !number(args[1], UINT32_MAX, &base))) return NULL;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE)) return NULL;
    const uint8_t *data = view.buf;
    size_t bytes = (size_t)view.len, end = 0, rows = 0, most = count_whole(data, bytes);
    uint8_t *to[COLUMNS];
    PyObject *result = PyTuple_New(COLUMNS + 1);
    for (int i = 0; result && i < COLUMNS; i++) {
        PyObject *column = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(most * widths[i]));
        if (!column || PyTuple_SetItem(result, i + 1, column)) { Py_CLEAR(result); break; }
        to[i] = (uint8_t *)PyByteArray_AsString(column);
    }
    if (result) {
        Py_BEGIN_ALLOW_THREADS
        rows = index_records(data, bytes, most, base, to, &end);
        Py_END_ALLOW_THREADS
        for (int i = 0; rows < most && i < COLUMNS; i++)
            if (PyByteArray_Resize(PyTuple_GetItem(result, i + 1), (Py_ssize_t)(rows * widths[i]))) { Py_CLEAR(result); break; }
    }
    PyBuffer_Release(&view);
    PyObject *where = result ? PyLong_FromSize_t(end) : NULL;
    if (!where) Py_CLEAR(result);
    else PyTuple_SetItem(result, 0, where);
    return result;
}

static PyObject *native_crc32c(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer view;
    unsigned int crc = 0;
    int table = 0;
    if (!PyArg_ParseTuple(args, "y*|Ip", &view, &crc, &table)) return NULL;
    crc = table ? ~crc_by_table(~crc, view.buf, (size_t)view.len) : crc32c(crc, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *native_allocate(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long size;
    int fd;
    return PyArg_ParseTuple(args, "iK", &fd, &size) ? allocate(fd, size) : NULL;
}

static PyObject *native_stop_at(PyObject *module, PyObject *args)
{
    (void)module;
    if (!PyArg_ParseTuple(args, "ii", &ring_stop_at, &ring_stop_signal)) return NULL;
    Py_RETURN_NONE;
}

/* ---- the module ---- */

static PyMethodDef ring_methods[] = {
    {"publish", FAST(Ring_publish), METH_FASTCALL, NULL},
    {"publish_many", FAST(Ring_publish_many), METH_FASTCALL, NULL},
    {"publish_drafts", FAST(Ring_publish_drafts), METH_FASTCALL, NULL},
    {"publish_unit", FAST(Ring_publish_unit), METH_FASTCALL, NULL},
    {"consumer", FAST(Ring_consumer), METH_VARARGS | METH_KEYWORDS, NULL},
    {"wait_committed", FAST(Ring_wait_committed), METH_FASTCALL, NULL},
    {"commit", FAST(Ring_commit), METH_O, NULL},
    {"grant", FAST(Ring_grant), METH_O, NULL},
    {"retire", FAST(Ring_retire), METH_FASTCALL, NULL},
    {"end", FAST(Ring_end), METH_O, NULL},
    {"wait", FAST(Ring_wait), METH_FASTCALL, NULL},
    {"seats", FAST(Ring_seats), METH_NOARGS, NULL},
    {"fileno", FAST(Ring_fileno), METH_NOARGS, NULL},
    {"close", FAST(Ring_close), METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef ring_getset[] = {
    {"size", (getter)(void (*)(void))Ring_get, NULL, NULL, (void *)0},
    {"generation", (getter)(void (*)(void))Ring_get, NULL, NULL, (void *)1},
    {"tail", (getter)(void (*)(void))Ring_get, NULL, NULL, (void *)2},
    {"committed", (getter)(void (*)(void))Ring_get, NULL, NULL, (void *)3},
    {"recovered", (getter)(void (*)(void))Ring_get, NULL, NULL, (void *)4},
    {"retired", (getter)(void (*)(void))Ring_get, NULL, NULL, (void *)5},
    {"holder", (getter)(void (*)(void))Ring_get, NULL, NULL, (void *)6},
    {"final", (getter)(void (*)(void))Ring_get, NULL, NULL, (void *)7},
    {"next", (getter)(void (*)(void))Ring_get, NULL, NULL, (void *)8},
    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot ring_slots[] = {
    {Py_tp_methods, ring_methods}, {Py_tp_getset, ring_getset}, {Py_tp_dealloc, (void *)Ring_dealloc}, {0, NULL}};
static PyType_Spec ring_spec = {"mqfs.ring._native.Ring", sizeof(Ring), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, ring_slots};

static PyMethodDef consumer_methods[] = {
    {"body", FAST(Consumer_body), METH_FASTCALL, NULL},
    {"bodies", FAST(Consumer_bodies), METH_FASTCALL, NULL},
    {"record", FAST(Consumer_record), METH_FASTCALL, NULL},
    {"records", FAST(Consumer_records), METH_FASTCALL, NULL},
    {"range", FAST(Consumer_range), METH_FASTCALL, NULL},
    {"release", FAST(Consumer_release), METH_NOARGS, NULL},
    {"skip", FAST(Consumer_skip), METH_NOARGS, NULL},
    {"close", FAST(Consumer_close), METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef consumer_getset[] = {
    {"seat", (getter)(void (*)(void))Consumer_get, NULL, NULL, (void *)0},
    {"position", (getter)(void (*)(void))Consumer_get, NULL, NULL, (void *)1},
    {"sequence", (getter)(void (*)(void))Consumer_get, NULL, NULL, (void *)2},
    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot consumer_slots[] = {
    {Py_tp_methods, consumer_methods}, {Py_tp_getset, consumer_getset}, {Py_tp_dealloc, (void *)Consumer_dealloc}, {0, NULL}};
static PyType_Spec consumer_spec = {"mqfs.ring._native.Consumer", sizeof(Consumer), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, consumer_slots};

static PyMethodDef functions[] = {
    {"create", FAST(native_create), METH_VARARGS | METH_KEYWORDS, NULL},
    {"attach", FAST(native_attach), METH_VARARGS | METH_KEYWORDS, NULL},
    {"scan", FAST(native_scan), METH_FASTCALL, NULL},
    {"crc32c", native_crc32c, METH_VARARGS, NULL},
    {"_allocate", native_allocate, METH_VARARGS, NULL},
    {"_stop_at", native_stop_at, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL}};

static int begin(PyObject *module)
{
    static const struct { const char *name; PyObject **to; } errors[] = {
        {"Again", &again}, {"BadRing", &bad_ring}, {"Busy", &busy}, {"Damaged", &damaged},
        {"Disconnected", &disconnected}, {"DiskFull", &disk_full},        {"FellBehind", &fell_behind}, {"OverLimit", &over_limit}, {"Stale", &stale}};
    PyObject *table = PyImport_ImportModule("mqfs.errors");
    for (size_t i = 0; table && i < sizeof errors / sizeof *errors; i++)
        if (!(*errors[i].to = PyObject_GetAttrString(table, errors[i].name))) Py_CLEAR(table);
    if (!table) return -1;
    Py_DECREF(table);
    crc_begin();
    if (pthread_atfork(NULL, NULL, after_fork)) return PyErr_NoMemory(), -1;
    ring_type = (PyTypeObject *)PyType_FromSpec(&ring_spec);
    consumer_type = (PyTypeObject *)PyType_FromSpec(&consumer_spec);
    return !ring_type || !consumer_type || PyModule_AddObjectRef(module, "Ring", (PyObject *)ring_type) ||
           PyModule_AddObjectRef(module, "Consumer", (PyObject *)consumer_type) ||
           PyModule_AddIntConstant(module, "RECORD_HEAD", sizeof(struct ring_record)) ||
           PyModule_AddIntConstant(module, "HEAD_BYTES", RING_HEAD_BYTES) || PyModule_AddIntConstant(module, "STOPS", STOPS) ||
           PyModule_AddIntConstant(module, "SEATS", RING_SEATS) || PyModule_AddIntConstant(module, "CRC_BY_CPU", crc_cpu) ||
           PyModule_AddStringConstant(module, "SOURCE", SOURCE)
               ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)begin}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "mqfs.ring._native", NULL, 0, functions, module_slots,
                                        NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
