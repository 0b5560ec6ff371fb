/* A consumer of a ring as a Python object. */
#include "module.h"

static void settle(Consumer *self) /* release the room of what was read to the publishers */
{
    if (self->released == self->position) return;
    ring_release(&self->ring->h, (unsigned)self->slot, self->position);
    self->released = self->position;
}

static void advance(Consumer *self, const struct ring_record *head)
{
    self->position += ring_padded(head->size);
    self->last = head->sequence;
    if (self->hold) return;
    if (!self->gates || self->position - self->released >= self->ring->h.size / 16) settle(self);
}

static int overtaken(const Consumer *self)
{
    PyErr_Format(errors.fell_behind, "overtaken after sequence %llu", (unsigned long long)self->last);
    return -1;
}

static int fail(Consumer *self, enum ring_result result)
{
    if (result == RING_OVERTAKEN && !self->slot) result = RING_DAMAGED; /* publishers wait for the kept one: it cannot be overtaken */
    if (result == RING_OVERTAKEN) {
        self->position = atomic_load(&self->ring->h.shared->tail) & ~UINT64_C(7);
        if (!self->hold) settle(self);
        return overtaken(self);
    }
    if (result == RING_DAMAGED) {
        PyObject *error = PyObject_CallFunction(errors.damaged, "Ks", (unsigned long long)self->last + 1,
                                                "no record at its position (corrupt ring)");
        if (error) PyErr_SetObject(errors.damaged, error);
        Py_XDECREF(error);
    } else {
        refuse(result);
    }
    return -1;
}

static int enter(Consumer *self)
{
    if (self->slot < 0) return PyErr_SetString(errors.stale, "consumer closed"), 0;
    if (!usable(self->ring)) return 0;
    if (self->busy) return PyErr_SetString(errors.busy, "consumer in use by another thread"), 0;
    self->ring->users++;
    return self->busy = 1;
}

static void leave(Consumer *self)
{
    self->busy = 0;
    self->ring->users--;
}

/* Wait for the next record and read its head. 1: done; 0: none came in time; -1: error. */
static int await_head(Consumer *self, int64_t until, struct ring_record *head)
{
    struct ring_handle *h = &self->ring->h;
    if (self->fell) { /* it has continued at the tail of that moment */
        self->fell = 0;
        return overtaken(self);
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
        if (interrupted(self->ring)) return -1;
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

/* The next record in that shape; NULL without an error if none came in time. Bodies are of messages only. */
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
    int fell = PyErr_ExceptionMatches(errors.fell_behind);
    if (PyList_Size(all) && (fell || PyErr_ExceptionMatches(errors.damaged) || PyErr_ExceptionMatches(errors.stale))) {
        PyErr_Clear(); /* return the records read before: the next call meets the condition again */
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
        PyThreadState *others = bytes >= LARGE_BYTES ? PyEval_SaveThread() : NULL;
        memcpy(to, h->data + (self->position & (h->size - 1)), bytes);
        if (others) PyEval_RestoreThread(others);
        result = ring_overtaken(h, self->position) ? RING_OVERTAKEN : RING_OK;
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

static void detach(Consumer *self)
{
    if (self->slot >= 0 && self->ring->h.shared) {
        if (!self->hold) settle(self);
        ring_free_slot(&self->ring->h, (unsigned)self->slot);
    }
    self->slot = -1;
}

static PyObject *Consumer_close(Consumer *self, PyObject *nothing)
{
    (void)nothing;
    if (self->busy) return PyErr_SetString(errors.busy, "consumer in use by another thread"), NULL;
    detach(self);
    Py_RETURN_NONE;
}

static PyObject *Consumer_get(Consumer *self, void *what)
{
    if (what == (void *)0) return PyLong_FromLong(self->slot);
    if (what == (void *)1) return PyLong_FromUnsignedLongLong(self->position);
    return PyLong_FromUnsignedLongLong(self->last);
}

static void Consumer_dealloc(PyObject *object)
{
    Consumer *self = (Consumer *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->ring) detach(self);
    Py_XDECREF((PyObject *)self->ring);
    PyObject_Free(self);
    Py_DECREF(type);
}

PyObject *Ring_consumer(Ring *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"gates", "kept", "hold", "wait", NULL};
    static const char *const ways[] = {"spin", "yield", "block"};
    int gates = 0, kept = 0, hold = 0, how = 0, result = RING_BUSY, slot = -1, error = 0;
    const char *way = "block";
    uint64_t position = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$ppps", names, &gates, &kept, &hold, &way)) return NULL;
    while (how < 3 && strcmp(way, ways[how])) how++;
    if (how == 3) return PyErr_SetString(PyExc_ValueError, "invalid wait (expected spin, yield or block)"), NULL;
    if (!claim(self)) return NULL;
    enum ring_slot_state state = kept ? SLOT_KEPT : gates ? SLOT_GATES : SLOT_FOLLOWS;
    if (kept) { /* even if another holds the lock */
        result = RING_OK;
        slot = ring_take_slot(&self->h, state, &position);
        error = errno;
    }
    while (result == RING_BUSY) {
        Py_BEGIN_ALLOW_THREADS
        if (!(result = ring_lock(self->h.shared, RING_NAP_NS))) {
            slot = ring_take_slot(&self->h, state, &position);
            error = errno;
            ring_unlock(self->h.shared);
        } else if (atomic_load(&self->h.shared->retired)) {
            result = RING_RETIRED;
        }
        Py_END_ALLOW_THREADS
        if (interrupted(self)) break;
    }
    self->publishes = 0;
    if (slot < 0 && !PyErr_Occurred()) {
        if (result) refuse((enum ring_result)result);
        else if (error == EINVAL) refuse(RING_DAMAGED);
        else PyErr_SetString(errors.busy, "no free consumer slot in the ring");
    }
    if (slot < 0) return NULL;
    Consumer *consumer = PyErr_Occurred() ? NULL : PyObject_New(Consumer, consumer_type);
    if (!consumer) {
        if (self->h.shared) ring_free_slot(&self->h, (unsigned)slot);
        return NULL;
    }
    consumer->ring = (Ring *)Py_NewRef((PyObject *)self);
    consumer->position = consumer->released = position;
    consumer->last = 0;
    consumer->slot = slot;
    consumer->gates = gates || kept;
    consumer->hold = hold;
    consumer->busy = consumer->fell = 0;
    consumer->how = (enum ring_wait)how;
    return (PyObject *)consumer;
}

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
    {"slot", (getter)(void (*)(void))Consumer_get, NULL, NULL, (void *)0},
    {"position", (getter)(void (*)(void))Consumer_get, NULL, NULL, (void *)1},
    {"sequence", (getter)(void (*)(void))Consumer_get, NULL, NULL, (void *)2},
    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot consumer_slots[] = {
    {Py_tp_methods, consumer_methods}, {Py_tp_getset, consumer_getset}, {Py_tp_dealloc, (void *)Consumer_dealloc}, {0, NULL}};
PyType_Spec consumer_spec = {"mqfs.ring._native.Consumer", sizeof(Consumer), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, consumer_slots};
