/* A buffer of records as columns, each record checked. The columns have a row for each record that count_whole saw; the second look,
 * at a buffer that may have been written to meanwhile, fills no more. */
#include "module.h"

enum { SEQUENCE, TIME, POSITION, BODY, STREAM, HEADERS, KIND, FLAGS, COLUMNS };
static const size_t widths[COLUMNS] = {8, 8, 4, 4, 4, 2, 1, 1};

/* Read the head of the record at `at`, if the buffer has it whole. */
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

/* Fill the columns. Returns the number of sound records, and their end in `end`. */
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

PyObject *native_scan(PyObject *module, PyObject *const *args, Py_ssize_t count)
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

/* ---- columns that were scanned ---- */

static void release(Py_buffer *column, int count)
{
    while (count--) PyBuffer_Release(column + count);
}

/* Columns that all have the same number of rows, as wide as `width` says; 0 with an error set and none held. */
static int columns(PyObject *const *from, int count, Py_buffer *to, const char *width)
{
    for (int i = 0; i < count; i++) {
        if (PyObject_GetBuffer(from[i], to + i, PyBUF_SIMPLE)) return release(to, i), 0;
        if (to[i].len % width[i] || to[i].len / width[i] != to->len / *width) {
            release(to, i + 1);
            return PyErr_SetString(PyExc_ValueError, "columns of different lengths"), 0;
        }
    }
    return 1;
}

/* The next state of an atomic batch, by the flags of a record: FIRST and MORE are 1, JOINED and MORE 3, JOINED alone ends it (2). An
 * ephemeral message (4) is a batch of its own. -1: no batch continues so. */
static int next_state(int inside, uint8_t flags)
{
    if (inside) return flags == 3 ? 1 : flags == 2 ? 0 : -1;
    return flags == 1 ? 1 : flags == 0 || flags == 4 ? 0 : -1;
}

/* ordered(sequences, times): whether each sequence is the one after that before it, and no time is before that before it. */
PyObject *native_ordered(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Py_buffer column[2];
    if (!arguments("ordered", count, 2, 2) || !columns(args, 2, column, "\10\10")) return NULL;
    const uint8_t *sequences = column[0].buf, *times = column[1].buf;
    size_t rows = (size_t)column[0].len / 8;
    int fits = 1;
    for (size_t row = 1; row < rows && fits; row++) {
        uint64_t sequence[2];
        int64_t time[2];
        memcpy(sequence, sequences + 8 * (row - 1), sizeof sequence);
        memcpy(time, times + 8 * (row - 1), sizeof time);
        fits = sequence[1] == sequence[0] + 1 && time[1] >= time[0];
    }
    release(column, 2);
    return PyBool_FromLong(fits);
}

/* plain(bodies, headers, kinds, flags, streams, most, first, next): whether all are messages without headers, in whole batches, of 1
 * to `most` bytes and of streams from `first` to before `next`. */
PyObject *native_plain(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Py_buffer column[5];
    uint64_t most, first, next;
    if (!arguments("plain", count, 8, 8) || !number(args[5], UINT32_MAX, &most) || !number(args[6], UINT32_MAX, &first) ||
        !number(args[7], UINT64_MAX, &next) || !columns(args, 5, column, "\4\2\1\1\4"))
        return NULL;
    const uint8_t *bodies = column[0].buf, *headers = column[1].buf, *kinds = column[2].buf, *flags = column[3].buf;
    const uint8_t *streams = column[4].buf;
    size_t rows = (size_t)column[2].len;
    int inside = 0;
    for (size_t row = 0; row < rows && inside >= 0; row++) {
        uint32_t body, stream;
        memcpy(&body, bodies + 4 * row, 4);
        memcpy(&stream, streams + 4 * row, 4);
        inside = next_state(inside, flags[row]);
        if (stream < first || stream >= next) inside = -1;
        if (kinds[row] != 1 || headers[2 * row] || headers[2 * row + 1] || !body || body > most) inside = -1;
    }
    release(column, 5);
    return PyBool_FromLong(!inside);
}

/* shift(positions, by): the positions, each that much further on. */
PyObject *native_shift(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Py_buffer column[1];
    uint64_t by;
    if (!arguments("shift", count, 2, 2) || !number(args[1], UINT32_MAX, &by) || !columns(args, 1, column, "\4")) return NULL;
    PyObject *made = PyByteArray_FromStringAndSize(column->buf, column->len);
    uint8_t *to = made ? (uint8_t *)PyByteArray_AsString(made) : NULL;
    for (size_t row = 0; made && row < (size_t)column->len / 4; row++) {
        uint32_t position;
        memcpy(&position, to + 4 * row, 4);
        position += (uint32_t)by;
        memcpy(to + 4 * row, &position, 4);
    }
    release(column, 1);
    return made;
}
