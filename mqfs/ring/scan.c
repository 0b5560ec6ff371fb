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
