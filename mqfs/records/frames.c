/* Many messages at once: frames of .batch -> blanks. A blank is a record without sequence, time, flags and sum, whose stream is a
 * place in a table. Nothing is kept between two calls.
 *
 * Bounds. A frame takes 8 bytes or more (no name, no headers, no body). Sizes are u32, of headers u16: a sum of some is taken in
 * size_t, where it cannot wrap. What `pack` makes of a frame (32 + sender + headers + body, padded) is counted by the very
 * expression that `blank` advances by. */
#include "native.h"
#include <string.h>

#define FRAME_BYTES 8u
#define HEAD_BYTES 32u
#define FEW 64u    /* headers of a message that are compared with one another here */
#define KEY_BYTES 255u /* of the header `key`: limits.py */
#define PART_DIGITS 9u /* of each number in the header `part`: limits.py */
#define CACHE 256u /* names found a moment ago */

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

/* Whether a header is neither `part` nor `key`, or is a place in a body, or a key: as check_value in
 * mqfs/engine/language/batch_frames.py. */
static int may_have_value(const uint8_t *key, size_t key_size, const uint8_t *p, size_t n)
{
    uint32_t values[2] = {0};
    size_t digits = 0, which = 0;
    if (key_size == 3 && !memcmp(key, "key", 3)) return n && n <= KEY_BYTES;
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
        if (!may_have_value(p + at + 1, key, p + value + 2, bytes)) return 0;
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
    PyObject *known, *more, *seen, *fresh; /* known and more: the places of names */
} Names;

static unsigned cached_at(const uint8_t *p, size_t n)
{
    uint64_t word = n;
    memcpy(&word, n > 8 ? p + n - 8 : p, n > 8 ? 8 : n);
    return (unsigned)(((word ^ n << 56) * UINT64_C(0x9e3779b97f4a7c15)) >> 56);
}

enum { NO_NAME = -2 };

/* The row of a name that is not in the cache; NO_NAME where it is not UTF-8, -1 with an error set. */
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
    if (!found && !PyErr_Occurred()) found = PyDict_GetItemWithError(names->more, key);
    if (!found && !PyErr_Occurred() && !is_utf8(text, size)) {
        row = NO_NAME;
        goto done;
    }
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

/* What of the frames is looked at: from `at` on, until `stop` is reached or one is not to be taken here. */
typedef struct {
    const uint8_t *data;
    size_t n, at, stop, most, most_head, sender, reserved_count;
    int always; /* the sender is put in front of no headers, too */
    Text reserved[FEW];
} Frames;

/* Count what is taken, and have `at` behind it: 0, or -1 with an error set. */
static int look(Frames *of, Names *names, uint32_t *owners, size_t *frames, size_t *room, int *headed)
{
    FrameHead frame;
    for (; of->at < of->stop; of->at += frame.size) {
        if (of->n - of->at < FRAME_BYTES) return 0;
        memcpy(&frame, of->data + of->at, FRAME_BYTES);
        size_t before = FRAME_BYTES + frame.name + (size_t)frame.head;
        if (!frame.name || frame.size > of->n - of->at || frame.size < before || frame.size - before > of->most) return 0;
        const uint8_t *text = of->data + of->at + FRAME_BYTES;
        if (frame.head && (frame.head > of->most_head || !may_be_set(text + frame.name, frame.head, of->reserved, of->reserved_count)))
            return 0;
        uint32_t *cached = names->cache + cached_at(text, frame.name);
        const Text *name = *cached ? &names->rows[*cached - 1].name : NULL;
        if (!name || name->size != frame.name || memcmp(name->text, text, frame.name)) {
            Py_ssize_t found = row_of(names, text, frame.name);
            if (found < 0) return found == NO_NAME ? 0 : -1;
            *cached = (uint32_t)found + 1;
        }
        Row *row = names->rows + *cached - 1;
        row->messages++;
        row->size += frame.size - before;
        row->last = (uint32_t)*frames;
        owners[(*frames)++] = row->place;
        size_t head = frame.head || of->always ? of->sender + frame.head : 0;
        if (head) *headed = 1;
        *room += padded(HEAD_BYTES + head + (frame.size - before));
    }
    return 0;
}

/* The same frames, the first of which is at `data`. */
static void blank(const Frames *of, const uint8_t *data, const uint32_t *owners, const uint8_t *sender, uint8_t *to)
{
    FrameHead frame;
    for (const uint8_t *end = of->data + of->at; data < end; data += frame.size) {
        memcpy(&frame, data, FRAME_BYTES);
        size_t own = frame.head || of->always ? of->sender : 0, rest = frame.size - FRAME_BYTES - frame.name; /* headers and body */
        Head head = {.size = (uint32_t)(HEAD_BYTES + own + rest), .stream = *owners++, .kind = MESSAGE,
                     .headers = (uint16_t)(own + frame.head)};
        uint64_t none = 0;
        memcpy(to, &head, HEAD_BYTES);
        memcpy(to + HEAD_BYTES, sender, own);
        memcpy(to + HEAD_BYTES + own, data + FRAME_BYTES + frame.name, rest);
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

/* pack(frames, known, more, sender, reserved, at, stop, always, most, most_head): (unsequenced records, how many, fresh names,
 * rows, whether some have headers, where the frames that were taken end), of those that begin at `at` or behind and before `stop`,
 * up to the first that is not to be taken here; None where that is the first. */
PyObject *native_pack(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    unsigned long long with[5];
    Py_buffer data, sender = {0};
    Frames of = {0};
    if (!arguments("pack", count, 10) || !integers(args + 5, 5, with)) return NULL;
    Py_ssize_t reserved_count = PyTuple_Size(args[4]);
    if (reserved_count < 0 || reserved_count > (Py_ssize_t)FEW || !PyDict_Check(args[1]) || !PyDict_Check(args[2])) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "pack: known and more are dicts, reserved a short tuple");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < reserved_count; i++) {
        char *text;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(args[4], i), &text, &size)) return NULL;
        of.reserved[i] = (Text){(uint8_t *)text, (size_t)size};
    }
    if (PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[3], &sender, PyBUF_SIMPLE)) return PyBuffer_Release(&data), NULL;
    size_t n = (size_t)data.len, frames = 0, room = 0;
    of.data = data.buf, of.n = n, of.reserved_count = (size_t)reserved_count, of.sender = (size_t)sender.len;
    of.at = with[0] < n ? (size_t)with[0] : n, of.stop = with[1] < n ? (size_t)with[1] : n, of.always = with[2] != 0;
    of.most = (size_t)with[3], of.most_head = (size_t)with[4];
    const uint8_t *begin = of.data + of.at;
    PyObject *result = NULL, *made = NULL, *rows = NULL;
    Names names = {.known = args[1], .more = args[2], .seen = PyDict_New(), .fresh = PyList_New(0)};
    names.known_count = (size_t)PyDict_Size(args[1]) + (size_t)PyDict_Size(args[2]);
    /* A frame takes FRAME_BYTES or more (its size is at least `before`), and begins between `at` and `stop`: there are at most
     * as many as these are apart, by FRAME_BYTES, rounded up; one more, so that nothing is no allocation of 0 bytes. */
    size_t apart = of.stop > of.at ? of.stop - of.at : 0;
    uint32_t *owners = PyMem_Malloc((apart / FRAME_BYTES + 2) * sizeof *owners);
    int headed = 0, fits = with[3] <= UINT32_MAX / 2 && with[4] <= UINT16_MAX && with[4] + of.sender <= UINT16_MAX;
    if (!owners) PyErr_NoMemory();
    else if (names.seen && names.fresh && (!fits || !look(&of, &names, owners, &frames, &room, &headed))) {
        if (!frames && (!fits || apart)) {
            result = Py_NewRef(Py_None);
        } else if ((made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)room)) && (rows = rows_of(&names))) {
            blank(&of, begin, owners, sender.buf, (uint8_t *)PyBytes_AsString(made));
            result = Py_BuildValue("(OnOOin)", made, (Py_ssize_t)frames, names.fresh, rows, headed, (Py_ssize_t)of.at);
        }
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

/* frames(data): how many there are, their heads unchecked. */
PyObject *native_frames(PyObject *module, PyObject *data)
{
    (void)module;
    Py_buffer of;
    if (PyObject_GetBuffer(data, &of, PyBUF_SIMPLE)) return NULL;
    Py_ssize_t count = 0;
    for (size_t at = 0, n = (size_t)of.len; n - at >= FRAME_BYTES; count++) {
        uint32_t size;
        memcpy(&size, (const uint8_t *)of.buf + at, sizeof size);
        if (size < FRAME_BYTES) break;
        if (size >= n - at) { count++; break; }
        at += size;
    }
    PyBuffer_Release(&of);
    return PyLong_FromSsize_t(count);
}
