/* Runs of records, many at once: checked and gathered into the columns that Arrow has, or thinned out to some streams.
 * Nothing here keeps anything between two calls. What a record is: docs/reference/format.md.
 *
 * Bounds. A record takes 32 bytes or more, so a run of n bytes has at most n / 32, and n < 2^32 keeps every sum of sizes below
 * 2^64. `whole` passes only records that end inside the run, so every read of a body does. A run is looked at twice, and a caller's
 * buffer may be written to between: the second look writes no more than the first one counted. */
#include "native.h"
#include "crc32c.h"
#include <string.h>

#define ALIGN 64u /* of a column in its room: what Arrow likes */
#define NOWHERE ((size_t)-1)

typedef struct { /* streams by number, ascending */
    const uint32_t *numbers;
    const uint64_t *bounds; /* of each the first sequence that is wanted, and the first that is not any more */
    const int32_t *ends;    /* of their names, which lie one behind the other; a 0 in front */
    const char *names;
    size_t count;
} Table;

typedef struct { /* what the wanted messages of a run need */
    size_t rows, body_bytes, name_bytes, headers;
} Needs;

enum { SEQUENCES, TIMES, VALUE_ENDS, VALUES, TOPIC_ENDS, TOPICS, POSITIONS, HEADERS, COLUMNS };

/* The head of the record at `at` if it lies whole in the buffer. */
static inline int whole(const uint8_t *data, size_t bytes, size_t at, Head *head)
{
    if (bytes - at < sizeof *head) return 0;
    memcpy(head, data + at, sizeof *head);
    return head->size >= sizeof *head + head->headers && padded(head->size) <= bytes - at && head->kind >= 1 && head->kind <= KIND_MOST;
}

static inline int passes(const uint8_t *record, const Head *head)
{
    return crc32c(crc32c(0, record, 4), record + 8, head->size - 8) == head->crc;
}

/* Where a stream stands in the table. Numbers are given one after the other, so the place is mostly known from the first. */
static inline size_t place(const Table *table, uint32_t number)
{
    if (!table->count || number < table->numbers[0]) return NOWHERE;
    size_t low = 0, high = table->count, guess = number - table->numbers[0];
    if (guess < high && table->numbers[guess] == number) return guess;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table->numbers[middle] < number) low = middle + 1;
        else high = middle;
    }
    return low < table->count && table->numbers[low] == number ? low : NOWHERE;
}

static inline int wanted(const Table *table, size_t at, uint64_t sequence)
{
    return at != NOWHERE && sequence >= table->bounds[2 * at] && sequence < table->bounds[2 * at + 1];
}

/* ---- records -> columns ---- */

/* What is wanted of a run, unchecked. */
static Needs measure(const uint8_t *data, size_t bytes, size_t at, const Table *table)
{
    Needs needs = {0};
    Head head;
    for (; whole(data, bytes, at, &head); at += padded(head.size)) {
        if (head.kind != MESSAGE) continue;
        size_t stream = place(table, head.stream);
        if (!wanted(table, stream, head.sequence)) continue;
        needs.rows++;
        needs.headers |= head.headers;
        needs.body_bytes += head.size - sizeof head - head.headers;
        needs.name_bytes += (size_t)(table->ends[stream + 1] - table->ends[stream]);
    }
    return needs;
}

typedef struct {
    uint8_t *column[COLUMNS]; /* NULL: not asked for */
    Needs done;
    uint64_t last; /* sequence of the last record, wanted or not */
    size_t end;
} Filled;

static void put(Filled *to, const uint8_t *data, size_t at, const Head *head, const Table *table, size_t stream)
{
    size_t row = to->done.rows++, body = head->size - sizeof *head - head->headers;
    int64_t us = head->time_ns / 1000 - (head->time_ns % 1000 < 0);
    to->done.headers |= head->headers;
    if (to->column[SEQUENCES]) memcpy(to->column[SEQUENCES] + 8 * row, &head->sequence, 8);
    if (to->column[TIMES]) memcpy(to->column[TIMES] + 8 * row, &us, 8);
    if (to->column[VALUES]) {
        memcpy(to->column[VALUES] + to->done.body_bytes, data + at + sizeof *head + head->headers, body);
        to->done.body_bytes += body;
        int32_t end = (int32_t)to->done.body_bytes;
        memcpy(to->column[VALUE_ENDS] + 4 * (row + 1), &end, 4);
    }
    if (to->column[TOPICS]) {
        size_t name = (size_t)(table->ends[stream + 1] - table->ends[stream]);
        memcpy(to->column[TOPICS] + to->done.name_bytes, table->names + table->ends[stream], name);
        to->done.name_bytes += name;
        int32_t end = (int32_t)to->done.name_bytes;
        memcpy(to->column[TOPIC_ENDS] + 4 * (row + 1), &end, 4);
    }
    if (to->column[HEADERS]) {
        uint32_t position = (uint32_t)at;
        memcpy(to->column[POSITIONS] + 4 * row, &position, 4);
        memcpy(to->column[HEADERS] + 2 * row, &head->headers, 2);
    }
}

/* Whether the columns, which have room for `needs`, have some for one more message. */
static inline int has_room(const Filled *to, const Needs *needs, const Head *head, const Table *table, size_t stream)
{
    return to->done.rows < needs->rows && head->size - sizeof *head - head->headers <= needs->body_bytes - to->done.body_bytes &&
           (size_t)(table->ends[stream + 1] - table->ends[stream]) <= needs->name_bytes - to->done.name_bytes;
}

/* Fill the columns up to the first record that does not pass. Returns whether all messages are of streams in the table, or there may
 * be `strangers`; 0: that at `end` is not. */
static int fill(Filled *to, const Needs *needs, const uint8_t *data, size_t bytes, size_t at, const Table *table, int strangers)
{
    Head head;
    for (; whole(data, bytes, at, &head) && passes(data + at, &head); at += padded(head.size)) {
        size_t stream = head.kind == MESSAGE ? place(table, head.stream) : NOWHERE;
        if (stream == NOWHERE && head.kind == MESSAGE && !strangers) return to->end = at, 0;
        if (wanted(table, stream, head.sequence)) {
            if (!has_room(to, needs, &head, table, stream)) break;
            put(to, data, at, &head, table, stream);
        }
        to->last = head.sequence;
    }
    return to->end = at, 1;
}

static void sizes(const Needs *needs, int asked, size_t *to)
{
    int headers = asked & 1 << HEADERS && needs->headers;
    to[SEQUENCES] = 8 * needs->rows;
    to[TIMES] = 8 * needs->rows;
    to[VALUE_ENDS] = to[TOPIC_ENDS] = 4 * (needs->rows + 1);
    to[VALUES] = needs->body_bytes;
    to[TOPICS] = needs->name_bytes;
    to[POSITIONS] = headers ? 4 * needs->rows : NOWHERE;
    to[HEADERS] = headers ? 2 * needs->rows : NOWHERE;
    for (int i = 0; i < POSITIONS; i++)
        if (!(asked & 1 << (i == VALUE_ENDS ? VALUES : i == TOPIC_ENDS ? TOPICS : i))) to[i] = NOWHERE;
}

/* Where each column lies in one room for all of them, NOWHERE if it was not asked for; returns the size of the room. */
static size_t lay_out(const Needs *needs, int asked, size_t *at, size_t *size)
{
    size_t room = 0;
    sizes(needs, asked, size);
    for (int i = 0; i < COLUMNS; i++) {
        at[i] = size[i] == NOWHERE ? NOWHERE : room;
        room += size[i] == NOWHERE ? 0 : (size[i] + ALIGN - 1) & ~(size_t)(ALIGN - 1);
    }
    return room;
}

/* (end, last sequence, rows, the room, and of each column where it begins there and its size or None). Headers may have been
 * measured in a record that does not pass its check: where no other has some, their columns are left out. */
static PyObject *told(const Filled *filled, PyObject *room, const size_t *at, const size_t *size)
{
    PyObject *result = Py_BuildValue("nKnO", (Py_ssize_t)filled->end, (unsigned long long)filled->last, (Py_ssize_t)filled->done.rows, room);
    PyObject *places = PyTuple_New(COLUMNS), *both = NULL;
    for (int i = 0; places && i < COLUMNS; i++) {
        int absent = at[i] == NOWHERE || (i >= POSITIONS && !filled->done.headers);
        PyObject *one = absent ? Py_NewRef(Py_None) : Py_BuildValue("nn", (Py_ssize_t)at[i], (Py_ssize_t)(at[i] + size[i]));
        if (!one || PyTuple_SetItem(places, i, one)) Py_CLEAR(places);
    }
    if (result && places) both = PyTuple_Pack(2, result, places);
    Py_XDECREF(result);
    Py_XDECREF(places);
    return both;
}

static PyObject *gathered(const Py_buffer *data, size_t begin, const Table *table, int asked, int strangers, PyObject *allocate)
{
    Filled filled = {0};
    Py_buffer view;
    Needs needs;
    size_t at[COLUMNS], size[COLUMNS];
    int known = 0;
    Py_BEGIN_ALLOW_THREADS
    needs = measure(data->buf, (size_t)data->len, begin, table);
    Py_END_ALLOW_THREADS
    if (needs.body_bytes > INT32_MAX || needs.name_bytes > INT32_MAX) return PyErr_SetString(PyExc_OverflowError, "too much for one batch"), NULL;
    size_t bytes = lay_out(&needs, asked, at, size);
    PyObject *result = NULL, *room = PyObject_CallFunction(allocate, "n", (Py_ssize_t)bytes);
    if (!room || PyObject_GetBuffer(room, &view, PyBUF_WRITABLE)) return Py_XDECREF(room), NULL;
    if ((size_t)view.len < bytes) PyErr_SetString(PyExc_ValueError, "less was allocated than asked for");
    else {
        Py_BEGIN_ALLOW_THREADS
        for (int i = 0; i < COLUMNS; i++) {
            filled.column[i] = at[i] == NOWHERE ? NULL : (uint8_t *)view.buf + at[i];
            if (filled.column[i] && (i == VALUE_ENDS || i == TOPIC_ENDS)) memset(filled.column[i], 0, 4);
        }
        known = fill(&filled, &needs, data->buf, (size_t)data->len, begin, table, strangers);
        Py_END_ALLOW_THREADS
        result = known ? told(&filled, room, at, size)
                       : PyErr_Format(PyExc_KeyError, "the stream of the record at %zu has no name", filled.end);
    }
    PyBuffer_Release(&view);
    Py_DECREF(room);
    return result;
}

static inline int aligned(const Py_buffer *column, size_t to) { return !column->len || (uintptr_t)column->buf % to == 0; }

/* Why these are no table of streams; NULL where they are. */
static const char *misfit(const Py_buffer *numbers, const Py_buffer *bounds, const Py_buffer *ends, const Py_buffer *names)
{
    size_t count = (size_t)numbers->len / 4;
    if (!aligned(numbers, 4) || !aligned(bounds, 8) || !aligned(ends, 4)) return "the columns of the table are not aligned";
    if ((size_t)bounds->len < 16 * count || (size_t)ends->len < 4 * (count + 1)) return "the columns of the table are not of one length";
    const int32_t *end = ends->buf;
    if (end[0] < 0 || end[count] > names->len) return "names of the table end outside of it";
    for (size_t i = 0; i < count; i++)
        if (end[i + 1] < end[i]) return "names of the table do not follow one another";
    return NULL;
}

PyObject *native_columns(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer data, numbers, bounds, ends, names;
    PyObject *allocate;
    Py_ssize_t begin;
    int asked, strangers;
    if (!PyArg_ParseTuple(args, "y*n(y*y*y*y*)ipO", &data, &begin, &numbers, &bounds, &ends, &names, &asked, &strangers, &allocate)) return NULL;
    Table table = {numbers.buf, bounds.buf, ends.buf, names.buf, (size_t)numbers.len / 4};
    PyObject *result = NULL;
    const char *wrong = misfit(&numbers, &bounds, &ends, &names);
    if (begin < 0 || begin > data.len || (size_t)data.len > UINT32_MAX)
        PyErr_SetString(PyExc_ValueError, "it begins outside of the buffer, or that is too large");
    else if (wrong)
        PyErr_SetString(PyExc_ValueError, wrong);
    else
        result = gathered(&data, (size_t)begin, &table, asked, strangers, allocate);
    Py_buffer *all[] = {&data, &numbers, &bounds, &ends, &names};
    for (int i = 0; i < 5; i++) PyBuffer_Release(all[i]);
    return result;
}

/* ---- some streams of a run ---- */

typedef struct {
    size_t end, kept, rows, last_row; /* bytes that passed; bytes and records that are wanted; where the last of these is */
    uint64_t last;                    /* sequence of the last record, wanted or not */
    int headed;
} Picked;

/* Checks a run, and marks the places of the streams that it is of. */
static Picked look(const uint8_t *data, size_t bytes, const Table *table, uint8_t *seen)
{
    Picked found = {.last_row = NOWHERE};
    Head head;
    for (; whole(data, bytes, found.end, &head) && passes(data + found.end, &head); found.end += padded(head.size)) {
        size_t stream = head.kind <= END ? place(table, head.stream) : NOWHERE;
        found.last = head.sequence;
        found.headed |= head.headers != 0;
        if (stream == NOWHERE) continue;
        seen[stream] = 1;
        found.rows++;
        found.kept += padded(head.size);
        found.last_row = found.end;
    }
    return found;
}

static void copy(const uint8_t *data, size_t end, const Table *table, uint8_t *to, size_t room)
{
    Head head;
    for (size_t at = 0, size; whole(data, end, at, &head); at += size) {
        size = padded(head.size);
        if (head.kind > END || place(table, head.stream) == NOWHERE) continue;
        if (size > room) break;
        memcpy(to, data + at, size);
        to += size;
        room -= size;
    }
    memset(to, 0, room);
}

/* (bytes that passed, last sequence, records, where the last of them is or -1, headed, seen, bytes of them or None: all) */
PyObject *native_pick(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer data, numbers;
    if (!PyArg_ParseTuple(args, "y*y*", &data, &numbers)) return NULL;
    if (!aligned(&numbers, 4)) {
        PyBuffer_Release(&data);
        PyBuffer_Release(&numbers);
        return PyErr_SetString(PyExc_ValueError, "the numbers of streams are not aligned"), NULL;
    }
    Table table = {.numbers = numbers.buf, .count = (size_t)numbers.len / 4};
    Picked found;
    PyObject *kept = NULL, *result = NULL, *seen = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)table.count);
    if (seen) {
        uint8_t *marks = (uint8_t *)PyByteArray_AsString(seen);
        memset(marks, 0, table.count);
        Py_BEGIN_ALLOW_THREADS
        found = look(data.buf, (size_t)data.len, &table, marks);
        Py_END_ALLOW_THREADS
        kept = found.kept == found.end ? Py_NewRef(Py_None) : PyBytes_FromStringAndSize(NULL, (Py_ssize_t)found.kept);
    }
    if (kept && kept != Py_None) {
        Py_BEGIN_ALLOW_THREADS
        copy(data.buf, found.end, &table, (uint8_t *)PyBytes_AsString(kept), found.kept);
        Py_END_ALLOW_THREADS
    }
    if (kept)
        result = Py_BuildValue("nKnniOO", (Py_ssize_t)found.end, (unsigned long long)found.last, (Py_ssize_t)found.rows,
                               (Py_ssize_t)found.last_row, found.headed, seen, kept);
    Py_XDECREF(seen);
    Py_XDECREF(kept);
    PyBuffer_Release(&data);
    PyBuffer_Release(&numbers);
    return result;
}
