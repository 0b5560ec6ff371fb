/* What the parts of this extension share: the head of a record, and their functions. */
#ifndef MQFS_NATIVE_H
#define MQFS_NATIVE_H
#include <Python.h>
#include "record.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "logs are little-endian: without this part all is done in Python"
#endif
#define MESSAGE 1
#define END 2
#define KIND_MOST 6

typedef struct ring_record Head;

static inline size_t padded(size_t size) { return (size + 7) & ~(size_t)7; }

/* The arguments of a function, as integers; 0 with an error set. */
static inline int integers(PyObject *const *args, Py_ssize_t count, unsigned long long *to)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        to[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (to[i] == (unsigned long long)-1 && PyErr_Occurred()) return 0;
    }
    return 1;
}

static inline int arguments(const char *name, Py_ssize_t count, Py_ssize_t wanted)
{
    if (count == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, not %zd", name, wanted, count);
    return 0;
}

#pragma GCC visibility push(hidden)
extern PyType_Spec ready_spec;
int postings_begin(void); /* before all others of postings.c; -1 with an error set */
PyObject *native_pack(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_frames(PyObject *self, PyObject *data);
PyObject *native_stamp(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_unit(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_tally(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_total(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_postings(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_columns(PyObject *self, PyObject *args);
PyObject *native_pick(PyObject *self, PyObject *args);
PyObject *native_search(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *native_messages(PyObject *self, PyObject *const *args, Py_ssize_t count);
#pragma GCC visibility pop
#endif
