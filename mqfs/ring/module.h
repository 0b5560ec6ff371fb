/* Shared by the files of this extension: its objects, their errors, and how arguments are read. */
#ifndef MQFS_RING_MODULE_H
#define MQFS_RING_MODULE_H
#define _GNU_SOURCE
#include <Python.h>
#include "core.h"

#define LARGE_BYTES 65536 /* above it a copy lets other threads run */
#define FOREVER INT64_MAX
#define FAST(function) ((PyCFunction)(void (*)(void))(function))

typedef struct Ring {
    PyObject_HEAD
    struct ring_handle h;
    int fd, publishes, users, forked; /* fd: a description without locks, for other processes */
    uint64_t generation;
    struct Ring *following;
} Ring;

typedef struct {
    PyObject_HEAD
    Ring *ring;
    uint64_t position, released, last;
    int slot, gates, hold, busy, fell; /* fell: it was overtaken, and the error is pending */
    enum ring_wait how;
} Consumer;

#pragma GCC visibility push(hidden)
extern struct errors { /* of mqfs.errors */
    PyObject *again, *bad_ring, *busy, *damaged, *disconnected, *disk_full, *fell_behind, *over_limit, *stale;
} errors;
extern PyTypeObject *ring_type, *consumer_type;
extern PyType_Spec ring_spec, consumer_spec;

void close_ring(Ring *ring);
int refuse(enum ring_result result);
PyObject *Ring_consumer(Ring *self, PyObject *args, PyObject *keywords);
PyObject *native_bell(PyObject *module, PyObject *args);
PyObject *native_wait_any(PyObject *module, PyObject *args);
PyObject *native_scan(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *native_ordered(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *native_plain(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *native_shift(PyObject *module, PyObject *const *args, Py_ssize_t count);
#pragma GCC visibility pop

static inline int usable(const Ring *ring)
{
    if (ring->h.shared) return 1;
    PyErr_SetString(errors.stale, ring->forked ? "ring of the parent process (expected an attachment of the child's own)" : "ring closed");
    return 0;
}

/* Run the handlers of signals that have come; whether one raised an error, or forked: then this is the child, which has no ring. */
static inline int interrupted(const Ring *ring) { return PyErr_CheckSignals() || !usable(ring); }

static inline int64_t deadline(PyObject *timeout)
{
    if (!timeout || timeout == Py_None) return FOREVER;
    double seconds = PyFloat_AsDouble(timeout);
    if (seconds == -1.0 && PyErr_Occurred()) return -1;
    if (!(seconds > 0)) return 0;
    return seconds > 1e9 ? FOREVER : ring_clock(CLOCK_MONOTONIC) + (int64_t)(seconds * 1e9);
}

static inline int64_t remaining(int64_t until)
{
    if (until == FOREVER || until == 0) return until;
    int64_t left = until - ring_clock(CLOCK_MONOTONIC);
    return left > 0 ? left : 0;
}

static inline int arguments(const char *name, Py_ssize_t count, Py_ssize_t least, Py_ssize_t most)
{
    if (count >= least && count <= most) return 1;
    PyErr_Format(PyExc_TypeError, "%s() takes %zd to %zd arguments, not %zd", name, least, most, count);
    return 0;
}

static inline int number(PyObject *object, uint64_t most, uint64_t *value)
{
    *value = PyLong_AsUnsignedLongLong(object);
    if (*value == UINT64_MAX && PyErr_Occurred()) return 0;
    if (*value <= most) return 1;
    PyErr_SetString(PyExc_OverflowError, "number too large");
    return 0;
}

/* Begin to publish, or to change slots; at the end set `publishes` to 0. */
static inline int claim(Ring *ring)
{
    if (!usable(ring)) return 0;
    if (ring->publishes) return PyErr_SetString(errors.busy, "handle in use by another thread (expected a handle a thread)"), 0;
    return ring->publishes = 1;
}
#endif
