/* Many messages at once: frames of .batch -> blanks, blanks -> records, and a unit of a log looked through. A blank is a
 * record without sequence, time, flags and sum, whose stream is a place in a table. Nothing is kept between two calls.
 *
 * Bounds. A frame takes 8 bytes or more (no name, no headers, no body), a record 32 or more, in a log a multiple of 8. Sizes are
 * u32, of headers u16: a sum of some is taken in size_t, where it cannot wrap. What `pack` makes of a frame (32 + sender + headers +
 * body, padded) is counted by the very expression that `blank` advances by. `stamp` writes as many bytes as it is given; its
 * columns have a row for each record that count_blanks saw whole. `unit` counts messages and others, then writes these. */
#include "native.h"
#include "crc32c.h"
#include <string.h>

#define FRAME_BYTES 8u
#define HEAD_BYTES 32u
#define MORE 1u
#define INNER 2
#define FEW 64u    /* headers of a message that are compared with one another here */
#define PART_DIGITS 9u /* of each number in the header `part`: limits.py */
#define CACHE 256u /* names found a moment ago */

/* ---- frames -> blanks ---- */

static int is_utf8(const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n;) {
        uint8_t c = p[i++];
        if (c < 0x80) continue;
        size_t more = c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
        if (c < 0xc2 || c > 0xf4 || more > n - i) return 0;
        uint8_t low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80, high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
        if (p[i] < low || p[i] > high) return 0;
        for (i++; --more; i++)
            if ((p[i] & 0xc0) != 0x80) return 0;
    }
    return 1;
}

typedef struct { const uint8_t *text; size_t size; } Text;

/* Whether a header is not `part`, or is a place in a body: as parse_part in mqfs/log/headers.py. */
static int may_be_part(const uint8_t *key, size_t key_size, const uint8_t *p, size_t n)
{
    uint32_t values[2] = {0};
    size_t digits = 0, which = 0;
    if (key_size != 4 || memcmp(key, "part", 4)) return 1;
    for (size_t i = 0; i < n; i++) {
        if (p[i] == '/') {
            if (which || !values[0]) return 0;
            which = 1, digits = 0;
        } else if (p[i] < '0' || p[i] > '9' || ++digits > PART_DIGITS)
            return 0;
        else
            values[which] = values[which] * 10 + (p[i] - '0');
    }
    return values[0] && (!which || values[0] <= values[1]);
}

/* Whether a client may set these headers. 0 also where it is not known here. */
static int may_be_set(const uint8_t *p, size_t n, const Text *reserved, size_t reserved_count)
{
    Text keys[FEW];
    size_t count = 0;
    for (size_t at = 0, stop; at < n; at = stop) {
        size_t key = p[at], value = at + 1 + key, bytes;
        if (!key || count == FEW || value + 2 > n) return 0;
        bytes = p[value] | (size_t)p[value + 1] << 8;
        stop = value + 2 + bytes;
        if (stop > n || !is_utf8(p + at + 1, key) || !is_utf8(p + value + 2, bytes)) return 0;
        if (!may_be_part(p + at + 1, key, p + value + 2, bytes)) return 0;
        for (size_t i = 0; i < count; i++)
            if (keys[i].size == key && !memcmp(keys[i].text, p + at + 1, key)) return 0;
        for (size_t i = 0; i < reserved_count; i++)
            if (reserved[i].size == key && !memcmp(reserved[i].text, p + at + 1, key)) return 0;
        keys[count++] = (Text){p + at + 1, key};
    }
    return 1;
}

typedef struct {
    Text name;
    uint64_t size;
    uint32_t place, messages, last;
} Row;

typedef struct {
    Row *rows;
    size_t count, room, known_count;
    uint32_t cache[CACHE]; /* row + 1 */
    PyObject *known, *seen, *fresh;
} Names;

static unsigned cached_at(const uint8_t *p, size_t n)
{
    uint64_t word = n;
    memcpy(&word, n > 8 ? p + n - 8 : p, n > 8 ? 8 : n);
    return (unsigned)(((word ^ n << 56) * UINT64_C(0x9e3779b97f4a7c15)) >> 56);
}

/* The row of a name that is not in the cache; -1 with an error set. */
static Py_ssize_t row_of(Names *names, const uint8_t *text, size_t size)
{
    PyObject *key = PyBytes_FromStringAndSize((const char *)text, (Py_ssize_t)size), *found, *number = NULL;
    Py_ssize_t row = -1;
    if (!key) return -1;
    if ((found = PyDict_GetItemWithError(names->seen, key))) {
        Py_DECREF(key);
        return PyLong_AsSsize_t(found);
    }
    if (PyErr_Occurred()) goto done;
    found = PyDict_GetItemWithError(names->known, key);
    if (!found && (PyErr_Occurred() || PyList_Append(names->fresh, key))) goto done;
    size_t place = found ? PyLong_AsSize_t(found) : names->known_count + (size_t)PyList_Size(names->fresh) - 1;
    if (PyErr_Occurred()) goto done;
    if (names->count == names->room) {
        size_t room = names->room ? 2 * names->room : 16;
        Row *rows = PyMem_Realloc(names->rows, room * sizeof *rows);
        if (!rows) { PyErr_NoMemory(); goto done; }
        names->rows = rows;
        names->room = room;
    }
    if (!(number = PyLong_FromSize_t(names->count)) || PyDict_SetItem(names->seen, key, number)) goto done;
    names->rows[names->count] = (Row){{text, size}, 0, (uint32_t)place, 0, 0};
    row = (Py_ssize_t)names->count++;
done:
    Py_DECREF(key);
    Py_XDECREF(number);
    return row;
}

typedef struct { uint32_t size; uint16_t name, head; } FrameHead;

/* Look at every frame: 1 all may be taken, 0 something is unusual, -1 with an error set. */
static int look(const uint8_t *data, size_t n, Names *names, uint32_t *owners, size_t *frames, size_t *room, int *headed,
                size_t most, size_t most_head, size_t sender, const Text *reserved, size_t reserved_count)
{
    FrameHead frame;
    for (size_t at = 0; at < n; at += frame.size) {
        if (n - at < FRAME_BYTES) return 0;
        memcpy(&frame, data + at, FRAME_BYTES);
        size_t before = FRAME_BYTES + frame.name + (size_t)frame.head;
        if (!frame.name || frame.size > n - at || frame.size < before || frame.size - before > most) return 0;
        const uint8_t *text = data + at + FRAME_BYTES;
        if (frame.head) {
            if (frame.head > most_head || !may_be_set(text + frame.name, frame.head, reserved, reserved_count)) return 0;
            *headed = 1;
        }
        uint32_t *cached = names->cache + cached_at(text, frame.name);
        const Text *name = *cached ? &names->rows[*cached - 1].name : NULL;
        if (!name || name->size != frame.name || memcmp(name->text, text, frame.name)) {
            Py_ssize_t found = row_of(names, text, frame.name);
            if (found < 0) return -1;
            *cached = (uint32_t)found + 1;
        }
        Row *row = names->rows + *cached - 1;
        row->messages++;
        row->size += frame.size - before;
        row->last = (uint32_t)*frames;
        owners[(*frames)++] = row->place;
        *room += padded(HEAD_BYTES + (frame.head ? sender + frame.head : 0) + (frame.size - before));
    }
    return 1;
}

static void blank(const uint8_t *data, size_t n, const uint32_t *owners, const uint8_t *sender, size_t sender_bytes, uint8_t *to)
{
    FrameHead frame;
    for (size_t at = 0; at < n; at += frame.size) {
        memcpy(&frame, data + at, FRAME_BYTES);
        size_t own = frame.head ? sender_bytes : 0, rest = frame.size - FRAME_BYTES - frame.name; /* headers and body */
        Head head = {.size = (uint32_t)(HEAD_BYTES + own + rest), .stream = *owners++, .kind = MESSAGE,
                     .headers = (uint16_t)(own + frame.head)};
        uint64_t none = 0;
        memcpy(to, &head, HEAD_BYTES);
        memcpy(to + HEAD_BYTES, sender, own);
        memcpy(to + HEAD_BYTES + own, data + at + FRAME_BYTES + frame.name, rest);
        memcpy(to + head.size, &none, padded(head.size) - head.size);
        to += padded(head.size);
    }
}

static PyObject *rows_of(const Names *names)
{
    PyObject *list = PyList_New((Py_ssize_t)names->count);
    for (size_t i = 0; list && i < names->count; i++) {
        const Row *row = names->rows + i;
        PyObject *item = Py_BuildValue("(IIKI)", row->place, row->messages, (unsigned long long)row->size, row->last);
        if (!item || PyList_SetItem(list, (Py_ssize_t)i, item)) Py_CLEAR(list);
    }
    return list;
}

/* pack(frames, known, sender, reserved, most, most_head) */
PyObject *native_pack(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    unsigned long long most[2];
    Py_buffer data, sender = {0};
    Text reserved[FEW];
    if (!arguments("pack", count, 6) || !integers(args + 4, 2, most)) return NULL;
    Py_ssize_t reserved_count = PyTuple_Size(args[3]);
    if (reserved_count < 0 || reserved_count > (Py_ssize_t)FEW || !PyDict_Check(args[1]))
        return PyErr_Occurred() ? NULL : (PyErr_SetString(PyExc_TypeError, "pack: known is a dict, reserved a short tuple"), NULL);
    for (Py_ssize_t i = 0; i < reserved_count; i++) {
        char *text;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(args[3], i), &text, &size)) return NULL;
        reserved[i] = (Text){(uint8_t *)text, (size_t)size};
    }
    if (PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[2], &sender, PyBUF_SIMPLE)) return PyBuffer_Release(&data), NULL;
    size_t n = (size_t)data.len, frames = 0, room = 0, own = (size_t)sender.len;
    PyObject *result = NULL, *made = NULL, *rows = NULL;
    Names names = {.known = args[1], .known_count = (size_t)PyDict_Size(args[1]), .seen = PyDict_New(), .fresh = PyList_New(0)};
    /* A frame takes FRAME_BYTES or more of the n (its size is at least `before`), so there are at most n / FRAME_BYTES; one
     * more, so that nothing is no allocation of 0 bytes. */
    uint32_t *owners = PyMem_Malloc((n / FRAME_BYTES + 1) * sizeof *owners);
    int headed = 0, fits = -1;
    if (!owners) PyErr_NoMemory();
    else if (names.seen && names.fresh)
        fits = most[0] > UINT32_MAX / 2 || most[1] + own > UINT16_MAX
                   ? 0
                   : look(data.buf, n, &names, owners, &frames, &room, &headed, most[0], most[1], own, reserved, (size_t)reserved_count);
    if (fits > 0 && (made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)room)) && (rows = rows_of(&names))) {
        blank(data.buf, n, owners, sender.buf, own, (uint8_t *)PyBytes_AsString(made));
        result = Py_BuildValue("(OnOOi)", made, (Py_ssize_t)frames, names.fresh, rows, headed);
    } else if (!fits) {
        result = Py_NewRef(Py_None);
    }
    Py_XDECREF(made);
    Py_XDECREF(rows);
    Py_XDECREF(names.seen);
    Py_XDECREF(names.fresh);
    PyMem_Free(names.rows);
    PyMem_Free(owners);
    PyBuffer_Release(&sender);
    PyBuffer_Release(&data);
    return result;
}

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
    if (rows < 0) PyErr_SetString(PyExc_ValueError, "these are no blanks");
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
