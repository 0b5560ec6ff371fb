/* A run of records -> messages of the library: tuples of (sequence, stream, time, body, headers). Nothing is kept between two calls.
 *
 * Bounds. A record is read only where `message_at` has seen that its head, its headers and its body end inside the run: `at` is at
 * most `bytes` in the loop, the padded size at most what is left, so that `at` stays at most `bytes`. The buffer is a bytes object,
 * which is not written to. Headers are walked as in headers.py: a size that leads past their end ends them. The
 * collector may run Python code at an allocation: what is used after one, `stream` and the arguments, is held. */
#include "native.h"
#include "crc32c.h"
#include <string.h>

#define FIELDS 5

/* The head of the message at `at`; 0 for all else, which is left to the caller. */
static inline int message_at(const uint8_t *data, size_t bytes, size_t at, Head *head)
{
    if (bytes - at < sizeof *head) return 0;
    memcpy(head, data + at, sizeof *head);
    if (head->size < sizeof *head + head->headers || padded(head->size) > bytes - at || head->kind != MESSAGE) return 0;
    return crc32c(crc32c(0, data + at, 4), data + at + 8, head->size - 8) == head->crc;
}

/* Headers as a dict of texts. */
static PyObject *texts_of(const uint8_t *p, size_t n)
{
    PyObject *made = PyDict_New();
    for (size_t at = 0, end; made && at < n; at = end) {
        size_t value = at + 1 + p[at]; /* where its size lies */
        if (value + 2 > n) break;
        size_t size = p[value] | (size_t)p[value + 1] << 8;
        end = value + 2 + size;
        if (size > n - value - 2) size = n - value - 2;
        PyObject *key = PyUnicode_DecodeUTF8((const char *)p + at + 1, (Py_ssize_t)p[at], "replace");
        PyObject *text = key ? PyUnicode_DecodeUTF8((const char *)p + value + 2, (Py_ssize_t)size, "replace") : NULL;
        if (!text || PyDict_SetItem(made, key, text)) Py_CLEAR(made);
        Py_XDECREF(key);
        Py_XDECREF(text);
    }
    return made;
}

/* Whether one of the keys, each as it begins a header, is in these headers. */
static int has_key(const uint8_t *p, size_t n, Py_buffer *keys, Py_ssize_t count)
{
    for (size_t at = 0; at < n;) {
        size_t value = at + 1 + p[at];
        if (value + 2 > n) break;
        for (Py_ssize_t i = 0; i < count; i++)
            if ((size_t)keys[i].len == value - at && !memcmp(p + at, keys[i].buf, value - at)) return 1;
        at = value + 2 + (p[value] | (size_t)p[value + 1] << 8);
    }
    return 0;
}

/* search(data, begin, positions, sizes, keys): which of the records at those positions of a log, which is read from `begin` on, have
 * one of the keys, 8 at most, in their headers of those sizes, as far as these were read: their rows. */
PyObject *native_search(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    unsigned long long begin;
    Py_buffer data = {0}, positions = {0}, sizes = {0}, keys[8] = {{0}};
    Py_ssize_t wanted = count == 5 ? PyTuple_Size(args[4]) : 0, held = 0;
    PyObject *result = NULL;
    if (!arguments("search", count, 5) || wanted < 0 || !integers(args + 1, 1, &begin)) return NULL;
    if (wanted > 8) return PyErr_SetString(PyExc_ValueError, "more keys than 8"), NULL;
    if (PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE) || PyObject_GetBuffer(args[2], &positions, PyBUF_SIMPLE) ||
        PyObject_GetBuffer(args[3], &sizes, PyBUF_SIMPLE))
        goto done;
    while (held < wanted && !PyObject_GetBuffer(PyTuple_GetItem(args[4], held), &keys[held], PyBUF_SIMPLE)) held++;
    size_t rows = (size_t)positions.len / 4;
    if (held < wanted || !(result = PyList_New(0))) goto done;
    for (size_t row = 0; result && row < rows && row < (size_t)sizes.len / 2; row++) {
        uint32_t position;
        uint16_t size;
        memcpy(&position, (const uint8_t *)positions.buf + 4 * row, 4);
        memcpy(&size, (const uint8_t *)sizes.buf + 2 * row, 2);
        if (position < begin || position - begin + sizeof(Head) > (size_t)data.len) continue; /* the log ends before it */
        size_t at = (size_t)(position - begin) + sizeof(Head), left = (size_t)data.len - at;
        if (has_key((const uint8_t *)data.buf + at, size < left ? size : left, keys, wanted)) {
            PyObject *number = PyLong_FromSize_t(row);
            if (!number || PyList_Append(result, number)) Py_CLEAR(result);
            Py_XDECREF(number);
        }
    }
done:
    while (held) PyBuffer_Release(&keys[--held]);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&positions);
    PyBuffer_Release(&data);
    return result;
}

static PyObject *message_of(PyTypeObject *type, allocfunc allocate, const Head *head, PyObject *stream, const uint8_t *record,
                            PyObject *none)
{
    const uint8_t *after = record + sizeof *head;
    PyObject *made = allocate(type, FIELDS);
    if (!made) return NULL;
    PyObject *fields[FIELDS] = {
        PyLong_FromUnsignedLongLong(head->sequence), Py_NewRef(stream), PyLong_FromLongLong(head->time_ns),
        PyBytes_FromStringAndSize((const char *)after + head->headers, (Py_ssize_t)(head->size - sizeof *head - head->headers)),
        head->headers ? texts_of(after, head->headers) : Py_NewRef(none)};
    int bad = 0;
    for (Py_ssize_t i = 0; i < FIELDS; i++) bad |= !fields[i] || PyTuple_SetItem(made, i, fields[i]);
    if (bad) Py_CLEAR(made);
    else PyObject_GC_UnTrack(made); /* nothing in it refers to anything: the collector need not look */
    return made;
}

/* messages(data, at, names, type, to, none, since): append the messages from `at` on to a list, up to the first record that is none,
 * is damaged, not whole, or of a stream without a name. Left out are those of a stream whose name is None, and those without
 * headers from before `since`. `type`: a subclass of tuple that adds nothing; `none`: the headers of a message that has none.
 * Returns where it ended, the last sequence (0: of none), all their flags, and whether some of the appended have headers. */
PyObject *native_messages(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    char *text;
    Py_ssize_t size;
    if (!arguments("messages", count, 7) || PyBytes_AsStringAndSize(args[0], &text, &size)) return NULL;
    size_t at = PyLong_AsSize_t(args[1]), bytes = (size_t)size;
    if (PyErr_Occurred()) return NULL;
    long long since = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred()) return NULL;
    if (!PyDict_Check(args[2]) || !PyType_Check(args[3]) || !PyList_Check(args[4]) ||
        !PyType_IsSubtype((PyTypeObject *)args[3], &PyTuple_Type))
        return PyErr_SetString(PyExc_TypeError, "messages: expected names in a dict, a type of tuple, a list"), NULL;
    PyTypeObject *type = (PyTypeObject *)args[3];
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *stream = NULL, *result = NULL;
    unsigned long long last = 0;
    uint32_t number = 0;
    int flags = 0, headed = 0;
    Head head;
    for (; at < bytes && message_at((uint8_t *)text, bytes, at, &head); at += padded(head.size)) {
        if (!stream || head.stream != number) {
            PyObject *key = PyLong_FromUnsignedLong(number = head.stream);
            Py_XDECREF(stream);
            if ((stream = key ? PyDict_GetItemWithError(args[2], key) : NULL)) Py_INCREF(stream);
            Py_XDECREF(key);
            if (!stream && PyErr_Occurred()) return NULL;
            if (!stream) break;
        }
        last = head.sequence, flags |= head.flags;
        if (stream == Py_None || (!head.headers && head.time_ns < since)) continue;
        headed |= head.headers != 0;
        PyObject *made = message_of(type, allocate, &head, stream, (uint8_t *)text + at, args[5]);
        int failed = !made || PyList_Append(args[4], made);
        Py_XDECREF(made);
        if (failed) goto done;
    }
    result = Py_BuildValue("(nKii)", (Py_ssize_t)at, last, flags, headed);
done:
    Py_XDECREF(stream);
    return result;
}
