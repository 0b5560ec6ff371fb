/* A ring as a Python object: publishing, and the operations of its server. */
#include "module.h"

#define PORTION_BYTES 262144 /* of several records under one lock */
#define ANSWER_NS INT64_C(5000000000)

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
    if (kind < 1 || kind > 6) return PyErr_SetString(PyExc_ValueError, "invalid kind (expected 1 to 6)"), UINT64_C(0);
    if (head > UINT16_MAX || head + size > ring->h.size / 2 - sizeof(struct ring_record)) { /* two sizes of objects: no sum wraps */
        PyErr_Format(errors.over_limit, "record too large (expected at most half the ring, %llu bytes, and headers of 65535)",
                     (unsigned long long)ring->h.size / 2);
        return 0;
    }
    *part = (struct ring_part){headers ? PyBytes_AsString(headers) : NULL, PyBytes_AsString(body), (uint32_t)head,
                               (uint32_t)size, (uint32_t)stream, (uint8_t)kind, 0};
    return ring_part_bytes(part);
}

int refuse(enum ring_result result)
{
    if (result == RING_BUSY) PyErr_SetString(errors.again, "lock of the ring held by another thread");
    else if (result == RING_FULL) PyErr_SetString(errors.again, "ring full: a gating consumer is behind");
    else if (result == RING_BOUND) PyErr_SetString(errors.again, "no granted sequences left");
    else if (result == RING_RETIRED) PyErr_SetString(errors.stale, "ring retired (expected its newer generation)");
    else PyErr_SetString(errors.bad_ring, "corrupt state");
    return -1;
}

/* The ring was retired about when we published: wait for its final position, which tells whether the log took the records. It
 * comes soon, so the wait is longer than that for room. */
static int await_final(Ring *ring, int64_t until)
{
    struct ring *s = ring->h.shared;
    int64_t least = ring_clock(CLOCK_MONOTONIC) + ANSWER_NS;
    if (until < least) until = least;
    uint64_t final;
    for (int64_t left; (final = atomic_load(&s->final)) == UINT64_MAX;) {
        if (!(left = remaining(until))) return PyErr_SetString(errors.disconnected, "the ring's server is gone: outcome unknown"), -1;
        Py_BEGIN_ALLOW_THREADS
        ring_await(&s->commit, &s->final, UINT64_MAX, WAIT_BLOCK, left);
        Py_END_ALLOW_THREADS
        if (interrupted(ring)) return -1;
    }
    return final >= ring->h.end ? 0 : refuse(RING_RETIRED);
}

static int put(Ring *ring, const struct ring_part *parts, size_t count, uint64_t total, int64_t until, uint64_t *last)
{
    struct ring_handle *h = &ring->h;
    h->waits = until && !(h->mine & 1); /* the holder of the kept slot is the server, who waits for no client */
    for (int64_t left = 0;;) {
        int result;
        if (left || total >= LARGE_BYTES) {
            Py_BEGIN_ALLOW_THREADS
            result = ring_publish(h, parts, count, total, left < RING_NAP_NS ? left : RING_NAP_NS, last);
            Py_END_ALLOW_THREADS
        } else {
            result = ring_publish(h, parts, count, total, 0, last);
        }
        /* The holder of the kept slot is the one that would answer. */
        if (!result) return atomic_load(&h->shared->retired) && !(h->mine & 1) ? await_final(ring, until) : 0;
        /* A process stopped with the lock of a retired ring does not keep others from the next one. */
        if (result == RING_BUSY && atomic_load(&h->shared->retired)) result = RING_RETIRED;
        if (result == RING_LAGS) {
            if (!(left = remaining(until))) { h->waits = 0; continue; }
            Py_BEGIN_ALLOW_THREADS
            ring_await_followers(h, total, left);
            Py_END_ALLOW_THREADS
            if (interrupted(ring)) return -1;
            continue;
        }
        left = remaining(until);
        if (result > RING_BOUND || !left) return refuse(result);
        Py_BEGIN_ALLOW_THREADS
        if (result == RING_FULL) ring_await_room(h, total, left);
        if (result == RING_BOUND)
            ring_await(&h->shared->commit, &h->shared->bound, atomic_load(&h->shared->bound), WAIT_BLOCK, left);
        Py_END_ALLOW_THREADS
        if (interrupted(ring)) return -1;
    }
}

/* Point `part` at a message for one of the streams whose numbers are in a dict. 1: done; 0: it is not bytes, empty, of more than
 * `most` bytes, or the stream is not in the dict; -1: error. The caller holds the body, which does not change, as long as it uses
 * `part`. Only the look-up may run Python code (a subclass of str), and nothing was read before it. */
static int fill_known(const Ring *ring, struct ring_part *part, PyObject *numbers, PyObject *stream, PyObject *body, uint64_t most)
{
    uint64_t value;
    PyObject *found = PyUnicode_Check(stream) && PyBytes_Check(body) ? PyDict_GetItemWithError(numbers, stream) : NULL;
    if (!found) return PyErr_Occurred() ? -1 : 0;
    if (!number(found, UINT32_MAX, &value)) return -1;
    if (PyBytes_Size(body) < 1 || (uint64_t)PyBytes_Size(body) > most) return 0;
    return fill(ring, part, value, 1, NULL, body) ? 1 : -1;
}

/* publish_now(numbers, stream, body): publish a message if nothing is to be waited for, and so without letting other threads run:
 * its sequence. None: nothing was published, and `publish` tells why. */
static PyObject *Ring_publish_now(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    struct ring_handle *h = &self->h;
    struct ring_part part;
    uint64_t last;
    if (!arguments("publish_now", count, 3, 3)) return NULL;
    int filled = fill_known(self, &part, args[0], args[1], args[2], LARGE_BYTES);
    if (filled < 0) return NULL;
    if (!filled || !h->shared || self->publishes) Py_RETURN_NONE;
    h->waits = !(h->mine & 1); /* as `put`: a publisher that would overtake followers has to wait */
    if (ring_publish(h, &part, 1, ring_part_bytes(&part), 0, &last)) Py_RETURN_NONE;
    if (atomic_load(&h->shared->retired) && h->waits) {
        self->users++; /* nobody publishes any more, so `end` stays ours */
        int failed = await_final(self, 0);
        self->users--;
        if (failed) return NULL;
    }
    return PyLong_FromUnsignedLongLong(last);
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

/* Set how many records were published before the error that is set. */
static void set_published(Py_ssize_t count)
{
    PyObject *type, *error, *trace, *published = NULL;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (!(published = PyLong_FromSsize_t(count)) || PyObject_SetAttrString(error, "published", published)) PyErr_Clear();
    Py_XDECREF(published);
    PyErr_Restore(type, error, trace);
}

/* Publish parts, in portions; an atomic batch in one. */
static int put_all(Ring *ring, struct ring_part *parts, Py_ssize_t count, int atomic, int64_t until, uint64_t *last)
{
    uint64_t portion = ring->h.size / 4 < PORTION_BYTES ? ring->h.size / 4 : PORTION_BYTES;
    for (Py_ssize_t from = 0, to = 0; to < count; from = to) {
        uint64_t total = 0;
        do total += ring_part_bytes(&parts[to++]);
        while (to < count && (atomic || total + ring_part_bytes(&parts[to]) <= portion));
        if (total > ring->h.size / 2) return PyErr_SetString(errors.over_limit, "atomic batch too large (expected at most half the ring)"), -1;
        if (put(ring, parts + from, (size_t)(to - from), total, until, last)) return set_published(from), -1;
    }
    return 0;
}

/* Convert a draft (kind, stream, body[, headers]) to a part; `owners` keeps its buffers alive. */
static int draft(const Ring *ring, PyObject *item, struct ring_part *part, PyObject *owners)
{
    uint64_t kind, stream;
    PyObject *body = NULL, *headers = NULL;
    Py_ssize_t size = PyTuple_Check(item) ? PyTuple_Size(item) : 0;
    if (size != 3 && size != 4) return PyErr_SetString(PyExc_TypeError, "invalid draft (expected (kind, stream, body[, headers]))"), 0;
    if (!number(PyTuple_GetItem(item, 0), 255, &kind) || !number(PyTuple_GetItem(item, 1), UINT32_MAX, &stream)) return 0;
    int done = (body = as_bytes(PyTuple_GetItem(item, 2))) && !PyList_Append(owners, body) &&
               (size == 3 || ((headers = as_bytes(PyTuple_GetItem(item, 3))) && !PyList_Append(owners, headers))) &&
               fill(ring, part, stream, kind, headers, body);
    Py_XDECREF(body);
    Py_XDECREF(headers);
    return done;
}

/* The items are drafts of an atomic batch; or pairs for `fill_known`, with `numbers`, and `stream` is their most bytes: None where
 * one is not for it; or bodies of one stream. `all` holds what the parts point into, and `owners` what was made of it. */
static PyObject *publish_items(Ring *self, PyObject *items, PyObject *timeout, PyObject *numbers, uint64_t stream, int atomic,
                               uint64_t flags)
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
        if (numbers) {
            filled = PyTuple_Check(item) && PyTuple_Size(item) == 2 &&
                     fill_known(self, &parts[i], numbers, PyTuple_GetItem(item, 0), PyTuple_GetItem(item, 1), stream) > 0;
        } else if (atomic) {
            filled = draft(self, item, &parts[i], owners);
        } else if (PyBytes_CheckExact(item)) {
            filled = fill(self, &parts[i], stream, 1, NULL, item) != 0;
        } else if ((body = as_bytes(item))) {
            filled = !PyList_Append(owners, body) && fill(self, &parts[i], stream, 1, NULL, body);
            Py_DECREF(body);
        }
        if (!filled) goto failed;
        if (atomic) parts[i].flags = (uint8_t)((uint64_t)((i + 1 < count) | (i ? 2 : 0)) | flags); /* MORE, INNER */
    }
    if (!claim(self)) goto failed;
    int result = put_all(self, parts, count, atomic, until, &last);
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
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *Ring_publish_many(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t stream;
    if (!arguments("publish_many", count, 2, 3) || !number(args[0], UINT32_MAX, &stream)) return NULL;
    return publish_items(self, args[1], count > 2 ? args[2] : NULL, NULL, stream, 0, 0);
}

static PyObject *Ring_publish_pairs(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t most;
    if (!arguments("publish_pairs", count, 3, 4) || !number(args[2], UINT32_MAX, &most)) return NULL;
    return publish_items(self, args[1], count > 3 ? args[3] : NULL, args[0], most, 0, 0);
}

static PyObject *Ring_publish_unit(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    uint64_t flags = 0;
    if (!arguments("publish_unit", count, 1, 3) || (count > 2 && !number(args[2], 255, &flags))) return NULL;
    return publish_items(self, args[0], count > 1 ? args[1] : NULL, NULL, 0, 1, flags);
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
        ring_sleep(&s->commit, &s->committed, seen, left); /* at once: a commit takes longer than a look is worth */
        Py_END_ALLOW_THREADS
        if (interrupted(self)) break;
    }
    self->users--;
    return PyErr_Occurred() ? NULL : PyBool_FromLong(seen >= sequence);
}

static PyObject *store_word(Ring *self, PyObject *value, size_t at)
{
    uint64_t sequence;
    if (!usable(self) || !number(value, UINT64_MAX, &sequence)) return NULL;
    atomic_store((_Atomic uint64_t *)(void *)((char *)self->h.shared + at), sequence);
    ring_wake(&self->h.shared->commit);
    Py_RETURN_NONE;
}

static PyObject *Ring_commit(Ring *self, PyObject *value) { return store_word(self, value, offsetof(struct ring, committed)); }
static PyObject *Ring_grant(Ring *self, PyObject *value) { return store_word(self, value, offsetof(struct ring, bound)); }

static void wake_all(struct ring *s)
{
    ring_wake(&s->data);
    ring_wake(&s->space);
    ring_wake(&s->commit);
}

/* Retire the ring. True: no publisher is inside any more; later ones see that it is retired. */
static PyObject *Ring_retire(Ring *self, PyObject *const *args, Py_ssize_t count)
{
    if (!arguments("retire", count, 0, 1)) return NULL;
    int64_t until = deadline(count ? args[0] : NULL);
    if (until < 0 || !claim(self)) return NULL;
    struct ring *s = self->h.shared;
    int result;
    atomic_store(&s->retired, 1);
    Py_BEGIN_ALLOW_THREADS
    wake_all(s);
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
    wake_all(self->h.shared);
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
        if (interrupted(self)) break;
    }
    self->users--;
    return PyErr_Occurred() ? NULL : PyBool_FromLong(atomic_load(&s->tail) != seen);
}

/* ---- several rings at once ---- */

static _Atomic uint32_t bell; /* of this process: what a thread waits for has changed */

PyObject *native_bell(PyObject *module, PyObject *args)
{
    (void)module;
    int rings = 0;
    if (!PyArg_ParseTuple(args, "|p", &rings)) return NULL;
    if (rings) {
        atomic_fetch_add(&bell, 1);
        futex_wake(&bell, INT32_MAX);
    }
    return PyLong_FromUnsignedLong(atomic_load(&bell));
}

PyObject *native_wait_any(PyObject *module, PyObject *args)
{
    (void)module;
#ifdef FUTEX_WAITV_MAX
    PyObject *rows, *timeout, *ring;
    unsigned seen;
    if (!PyArg_ParseTuple(args, "O!IO", &PyList_Type, &rows, &seen, &timeout)) return NULL;
    int64_t until = deadline(timeout);
    if (until < 0) return NULL;
    struct futex_waitv waits[FUTEX_WAITV_MAX] = {{.uaddr = (uintptr_t)&bell, .val = seen, .flags = FUTEX_32}};
    Ring *used[FUTEX_WAITV_MAX];
    unsigned n = 1;
    int is_due = 0;
    long result = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(rows) && n < FUTEX_WAITV_MAX; i++, n++) {
        unsigned long long position;
        if (!PyArg_ParseTuple(PyList_GetItem(rows, i), "O!K", ring_type, &ring, &position) || !usable((Ring *)ring)) break;
        struct ring *s = ((Ring *)ring)->h.shared;
        waits[n] = (struct futex_waitv){.val = atomic_load(&s->data.word), .uaddr = (uintptr_t)&s->data.word, .flags = FUTEX_32};
        atomic_store(&s->data.asleep, 1);
        atomic_thread_fence(memory_order_seq_cst);
        is_due |= atomic_load(&s->tail) != position || atomic_load(&s->retired);
        Py_INCREF(ring);
        (used[n] = (Ring *)ring)->users++;
    }
    if (!PyErr_Occurred() && !is_due) {
        struct timespec limit = {until / 1000000000, until % 1000000000};
        Py_BEGIN_ALLOW_THREADS
        result = syscall(SYS_futex_waitv, waits, n, 0, &limit, CLOCK_MONOTONIC);
        if (result < 0) result = -errno;
        Py_END_ALLOW_THREADS
    }
    while (--n) {
        used[n]->users--;
        Py_DECREF(used[n]);
    }
    return PyErr_Occurred() ? NULL : PyBool_FromLong(result >= 0 || result == -ETIMEDOUT || result == -EAGAIN || result == -EINTR);
#else
    (void)args;
    Py_RETURN_FALSE;
#endif
}

static PyObject *Ring_slots(Ring *self, PyObject *nothing)
{
    (void)nothing;
    PyObject *all = usable(self) ? PyList_New(0) : NULL;
    for (unsigned i = 0; all && i < RING_SLOTS; i++) {
        struct ring_slot *slot = &self->h.shared->slot[i];
        uint32_t state = atomic_load(&slot->state);
        if (state == SLOT_FREE) continue;
        PyObject *row = Py_BuildValue("IIKOO", i, atomic_load(&slot->pid), (unsigned long long)atomic_load(&slot->position),
                                      state >= SLOT_GATES ? Py_True : Py_False, ring_slot_alive(&self->h, i) ? Py_True : Py_False);
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

static PyObject *Ring_close(Ring *self, PyObject *nothing)
{
    (void)nothing;
    if (self->users || self->publishes) return PyErr_SetString(errors.busy, "ring in use by another thread"), NULL;
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
    case 9: return PyBool_FromLong(atomic_load(&s->commit.asleep) != 0);
    case 7: return atomic_load(&s->final) == UINT64_MAX ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(atomic_load(&s->final));
    default: return PyBool_FromLong(atomic_load(&s->retired) != 0);
    }
}

static PyMethodDef ring_methods[] = {
    {"publish", FAST(Ring_publish), METH_FASTCALL, NULL},
    {"publish_now", FAST(Ring_publish_now), METH_FASTCALL, NULL},
    {"publish_many", FAST(Ring_publish_many), METH_FASTCALL, NULL},
    {"publish_pairs", FAST(Ring_publish_pairs), METH_FASTCALL, NULL},
    {"publish_unit", FAST(Ring_publish_unit), METH_FASTCALL, NULL},
    {"consumer", FAST(Ring_consumer), METH_VARARGS | METH_KEYWORDS, NULL},
    {"wait_committed", FAST(Ring_wait_committed), METH_FASTCALL, NULL},
    {"commit", FAST(Ring_commit), METH_O, NULL},
    {"grant", FAST(Ring_grant), METH_O, NULL},
    {"retire", FAST(Ring_retire), METH_FASTCALL, NULL},
    {"end", FAST(Ring_end), METH_O, NULL},
    {"wait", FAST(Ring_wait), METH_FASTCALL, NULL},
    {"slots", FAST(Ring_slots), METH_NOARGS, NULL},
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
    {"awaited", (getter)(void (*)(void))Ring_get, NULL, NULL, (void *)9},
    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot ring_slots[] = {
    {Py_tp_methods, ring_methods}, {Py_tp_getset, ring_getset}, {Py_tp_dealloc, (void *)Ring_dealloc}, {0, NULL}};
PyType_Spec ring_spec = {"mqfs.ring._native.Ring", sizeof(Ring), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, ring_slots};
