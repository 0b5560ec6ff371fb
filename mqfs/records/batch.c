/* Many messages at once: blanks (frames.c) -> records, and a unit of a log looked through. Nothing is kept between two calls.
 *
 * Bounds. A record takes 32 bytes or more, in a log a multiple of 8. Sizes are u32, of headers u16: a sum of some is taken in
 * size_t, where it cannot wrap. `stamp` writes as many bytes as it is given; its columns have a row for each record that
 * count_blanks saw whole. `unit` counts messages and others, then writes these. */
#include "native.h"
#include "crc32c.h"
#include <string.h>

#define HEAD_BYTES 32u
#define MORE 1u
#define INNER 2

/* ---- blanks -> records ---- */

enum { SEQUENCE, TIME, POSITION, BODY, STREAM, HEADERS, KIND, FLAGS, COLUMNS };
static const size_t widths[COLUMNS] = {8, 8, 4, 4, 4, 2, 1, 1};

/* How many blanks there are; -1 where something is none. */
static Py_ssize_t count_blanks(const uint8_t *data, size_t n, size_t places)
{
    Head head;
    Py_ssize_t count = 0;
    for (size_t at = 0; at < n; at += padded(head.size), count++) {
        if (n - at < HEAD_BYTES) return -1;
        memcpy(&head, data + at, HEAD_BYTES);
        if (head.size < HEAD_BYTES + (uint32_t)head.headers || head.size > n - at || padded(head.size) > n - at) return -1;
        if (head.kind != MESSAGE || head.stream >= places) return -1;
    }
    return count;
}

static PyObject *columns_of(Py_ssize_t rows, Py_ssize_t more, uint8_t **to)
{
    PyObject *result = PyTuple_New(COLUMNS + more);
    for (int i = 0; result && i < COLUMNS; i++) {
        PyObject *column = PyBytes_FromStringAndSize(NULL, rows * (Py_ssize_t)widths[i]);
        if (!column || PyTuple_SetItem(result, i + more, column)) Py_CLEAR(result);
        else to[i] = (uint8_t *)PyBytes_AsString(column);
    }
    return result;
}

static void put_row(uint8_t *const *to, size_t row, const Head *head, uint32_t position)
{
    uint32_t body = head->size - HEAD_BYTES - head->headers;
    const void *fields[COLUMNS] = {&head->sequence, &head->time_ns, &position, &body, &head->stream, &head->headers,
                                   &head->kind, &head->flags};
    for (int i = 0; i < COLUMNS; i++) memcpy(to[i] + row * widths[i], fields[i], widths[i]);
}

/* stamp(blanks, numbers, sequence, time_ns, first, rest, left, base) */
PyObject *native_stamp(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    unsigned long long with[6];
    Py_buffer data, numbers;
    if (!arguments("stamp", count, 8) || !integers(args + 2, 6, with)) return NULL;
    if (PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[1], &numbers, PyBUF_SIMPLE)) return PyBuffer_Release(&data), NULL;
    const uint8_t *from = data.buf, *table = numbers.buf;
    uint8_t *to[COLUMNS] = {NULL}, *out = NULL;
    Py_ssize_t rows = count_blanks(from, (size_t)data.len, (size_t)numbers.len / 4);
    PyObject *result = NULL, *made = NULL;
    if (rows < 0) PyErr_SetString(PyExc_ValueError, "not unsequenced records");
    else if ((result = columns_of(rows, 1, to)) && (made = PyBytes_FromStringAndSize(NULL, data.len))) {
        out = (uint8_t *)PyBytes_AsString(made);
        PyTuple_SetItem(result, 0, made);
    } else Py_CLEAR(result);
    for (size_t row = 0, at = 0; result && row < (size_t)rows; row++) {
        Head head;
        memcpy(&head, from + at, HEAD_BYTES);
        size_t room = padded(head.size);
        memcpy(&head.stream, table + 4 * (size_t)head.stream, 4);
        head.sequence = with[0] + row;
        head.time_ns = (int64_t)with[1];
        head.flags = (uint8_t)(row ? with[3] : with[2]);
        if (row + 1 == with[4]) head.flags &= (uint8_t)~MORE;
        memcpy(out + at, &head, HEAD_BYTES);
        memcpy(out + at + HEAD_BYTES, from + at + HEAD_BYTES, head.size - HEAD_BYTES);
        memset(out + at + head.size, 0, room - head.size);
        head.crc = crc32c(crc32c(0, &head.size, 4), out + at + 8, head.size - 8);
        memcpy(out + at + 4, &head.crc, 4);
        put_row(to, row, &head, (uint32_t)(with[5] + at));
        at += room;
    }
    PyBuffer_Release(&numbers);
    PyBuffer_Release(&data);
    return result;
}

/* ---- a unit of a log ---- */

typedef struct { /* of a record that is no message, as it lies in an index */
    uint64_t sequence;
    uint32_t position, body, stream;
    uint16_t headers;
    uint8_t kind, flags;
} Other;

/* How many messages and other records the unit of several that begins at `at` has, and where it ends; 0 where there is
 * none, or not all of it passes. */
static int measure_unit(const uint8_t *data, size_t n, size_t at, size_t *messages, size_t *others, size_t *end)
{
    Head head;
    for (int inner = 0;; inner = INNER, at += padded(head.size)) {
        if (n < HEAD_BYTES || at > n - HEAD_BYTES) return 0;
        memcpy(&head, data + at, HEAD_BYTES);
        if (head.size < HEAD_BYTES + (uint32_t)head.headers || head.size > n - at) return 0;
        if (head.kind < MESSAGE || head.kind > KIND_MOST || (head.flags & INNER) != inner) return 0;
        if (!inner && !(head.flags & MORE)) return 0;
        if (crc32c(crc32c(0, data + at, 4), data + at + 8, head.size - 8) != head.crc) return 0;
        *(head.kind <= END ? messages : others) += 1;
        if (head.flags & MORE) continue;
        *end = at + padded(head.size);
        return 1;
    }
}

/* unit(data, at, base) */
PyObject *native_unit(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    unsigned long long where[2];
    Py_buffer view;
    if (!arguments("unit", count, 3) || !integers(args + 1, 2, where) || PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE))
        return NULL;
    const uint8_t *data = view.buf;
    uint8_t *to[COLUMNS] = {NULL}, *rest = NULL;
    size_t messages = 0, others = 0, end = 0, row = 0;
    PyObject *result = NULL, *packed = NULL, *columns = NULL;
    int64_t last_ns = 0;
    if (!measure_unit(data, (size_t)view.len, (size_t)where[0], &messages, &others, &end)) result = Py_NewRef(Py_None);
    else if ((columns = columns_of((Py_ssize_t)messages, 0, to)) &&
             (packed = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(others * sizeof(Other)))))
        rest = (uint8_t *)PyBytes_AsString(packed);
    for (size_t at = (size_t)where[0]; rest && at < end;) {
        Head head;
        memcpy(&head, data + at, HEAD_BYTES);
        uint32_t position = (uint32_t)(where[1] + at);
        if (head.kind <= END) {
            put_row(to, row++, &head, position);
        } else {
            Other other = {head.sequence, position, head.size - HEAD_BYTES - head.headers, head.stream, head.headers,
                           head.kind, head.flags};
            memcpy(rest, &other, sizeof other);
            rest += sizeof other;
            last_ns = head.time_ns;
        }
        at += padded(head.size);
    }
    if (packed) result = Py_BuildValue("(nOOL)", (Py_ssize_t)end, columns, packed, (long long)last_ns);
    Py_XDECREF(columns);
    Py_XDECREF(packed);
    PyBuffer_Release(&view);
    return result;
}
