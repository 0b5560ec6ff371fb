/* The rows of each stream: the postings of a segment, which are their ordinals, their tally, and the sum of some of a column. Nothing
 * is kept between two calls but two random factors: a client that writes into a ring chooses the numbers, and none that it finds may
 * share their slots.
 *
 * Bounds. `whose` has an entry a row. There are size / 2 owners for `size` slots and `grow` comes before more than that, so half of
 * the slots are free and the search for one ends. Each owner's list has room for as many ordinals as rows were counted for it. */
#include <string.h>

#include "native.h"

typedef struct { uint32_t stream, count; uint8_t *to; } Owner;

typedef struct { unsigned long long bytes; uint32_t last; } Sum;

typedef struct {
    Owner *owners;
    uint32_t *slots; /* owner + 1 */
    size_t count, size;
    unsigned shift; /* to as many bits as a slot's number has */
} Owners;

static uint64_t factors[2]; /* odd, of this process */

int postings_begin(void)
{
    PyObject *module = PyImport_ImportModule("os");
    PyObject *random = module ? PyObject_CallMethod(module, "urandom", "n", (Py_ssize_t)sizeof factors) : NULL;
    char *bytes = random ? PyBytes_AsString(random) : NULL;
    if (bytes) memcpy(factors, bytes, sizeof factors);
    factors[0] |= 1;
    factors[1] |= 1;
    Py_XDECREF(random);
    Py_XDECREF(module);
    return bytes ? 0 : -1;
}

/* The high bits of a product depend on all bits of its factors. */
static uint32_t *slot_of(const Owners *o, uint32_t stream)
{
    uint64_t mixed = stream * factors[0];
    size_t at = (size_t)((mixed ^ mixed >> 32) * factors[1] >> o->shift);
    while (o->slots[at] && o->owners[o->slots[at] - 1].stream != stream) at = (at + 1) & (o->size - 1);
    return o->slots + at;
}

static int grow(Owners *o)
{
    size_t size = o->size ? 2 * o->size : 1 << 6;
    uint32_t *slots = PyMem_Calloc(size, sizeof *slots);
    Owner *owners = slots ? PyMem_Realloc(o->owners, size / 2 * sizeof *owners) : NULL;
    if (!owners) return PyMem_Free(slots), PyErr_NoMemory(), 0;
    PyMem_Free(o->slots);
    *o = (Owners){owners, slots, o->count, size, o->size ? o->shift - 1 : 64 - 6};
    for (size_t i = 0; i < o->count; i++) *slot_of(o, owners[i].stream) = (uint32_t)i + 1;
    return 1;
}

/* Of each row which owner; 0 with an error set. */
static int count_owners(const uint8_t *streams, size_t rows, Owners *o, uint32_t *whose)
{
    for (size_t row = 0; row < rows; row++) {
        uint32_t stream, *slot;
        memcpy(&stream, streams + 4 * row, 4);
        if (row && o->owners[whose[row - 1]].stream == stream) {
            o->owners[whose[row] = whose[row - 1]].count++;
            continue;
        }
        if (2 * o->count >= o->size && !grow(o)) return 0;
        if (!*(slot = slot_of(o, stream))) {
            o->owners[o->count] = (Owner){stream, 0, NULL};
            *slot = (uint32_t)++o->count;
        }
        whose[row] = *slot - 1;
        o->owners[whose[row]].count++;
    }
    return 1;
}

/* tally(streams, bodies): of each stream (number, rows, bytes of their bodies, ordinal of the last one), by the first one. */
PyObject *native_tally(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Py_buffer streams, bodies;
    if (!arguments("tally", count, 2) || PyObject_GetBuffer(args[0], &streams, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[1], &bodies, PyBUF_SIMPLE)) return PyBuffer_Release(&streams), NULL;
    size_t rows = (size_t)streams.len / 4;
    Owners o = {0};
    PyObject *result = NULL;
    uint32_t *whose = PyMem_Malloc((rows + 1) * sizeof *whose);
    Sum *sums = NULL;
    if (bodies.len != streams.len) PyErr_SetString(PyExc_ValueError, "columns of different lengths");
    else if (!whose) PyErr_NoMemory();
    else if (count_owners(streams.buf, rows, &o, whose) && !(sums = PyMem_Calloc(o.count + 1, sizeof *sums))) PyErr_NoMemory();
    else if (sums) result = PyList_New((Py_ssize_t)o.count);
    for (size_t row = 0; result && row < rows; row++) {
        uint32_t body;
        memcpy(&body, (const uint8_t *)bodies.buf + 4 * row, 4);
        sums[whose[row]].bytes += body;
        sums[whose[row]].last = (uint32_t)row;
    }
    for (size_t i = 0; result && i < o.count; i++) {
        PyObject *item = Py_BuildValue("(IIKI)", o.owners[i].stream, o.owners[i].count, sums[i].bytes, sums[i].last);
        if (!item || PyList_SetItem(result, (Py_ssize_t)i, item)) Py_CLEAR(result);
    }
    PyMem_Free(sums);
    PyMem_Free(whose);
    PyMem_Free(o.owners);
    PyMem_Free(o.slots);
    PyBuffer_Release(&bodies);
    PyBuffer_Release(&streams);
    return result;
}

static inline uint32_t value_at(const uint8_t *column, size_t width, size_t row)
{
    uint32_t four;
    uint16_t two;
    if (width == 1) return column[row];
    if (width == 2) return memcpy(&two, column + 2 * row, 2), two;
    return memcpy(&four, column + 4 * row, 4), four;
}

/* total(column, width, ordinals): the sum of those rows of a column, whose values have `width` bytes, 4 at most. */
PyObject *native_total(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    unsigned long long width, sum = 0;
    Py_buffer column, ordinals;
    if (!arguments("total", count, 3) || !integers(args + 1, 1, &width)) return NULL;
    if (width != 1 && width != 2 && width != 4) return PyErr_SetString(PyExc_ValueError, "no width of a column"), NULL;
    if (PyObject_GetBuffer(args[0], &column, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[2], &ordinals, PyBUF_SIMPLE)) return PyBuffer_Release(&column), NULL;
    size_t rows = (size_t)column.len / width, wanted = (size_t)ordinals.len / 4, at = 0;
    for (; at < wanted; at++) {
        size_t row = value_at(ordinals.buf, 4, at);
        if (row >= rows) break;
        sum += value_at(column.buf, width, row);
    }
    PyBuffer_Release(&ordinals);
    PyBuffer_Release(&column);
    if (at < wanted) return PyErr_SetString(PyExc_IndexError, "an ordinal is not in the column"), NULL;
    return PyLong_FromUnsignedLongLong(sum);
}

/* postings(streams, begin) */
PyObject *native_postings(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    unsigned long long begin;
    Py_buffer view;
    if (!arguments("postings", count, 2) || !integers(args + 1, 1, &begin)) return NULL;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE)) return NULL;
    size_t rows = (size_t)view.len / 4;
    Owners o = {0};
    PyObject *result = NULL;
    uint32_t *whose = PyMem_Malloc((rows + 1) * sizeof *whose);
    if (!whose) PyErr_NoMemory();
    else if (count_owners(view.buf, rows, &o, whose)) result = PyList_New((Py_ssize_t)o.count);
    for (size_t i = 0; result && i < o.count; i++) {
        PyObject *made = PyBytes_FromStringAndSize(NULL, 4 * (Py_ssize_t)o.owners[i].count);
        PyObject *item = made ? Py_BuildValue("(IN)", o.owners[i].stream, made) : NULL;
        if (!item || PyList_SetItem(result, (Py_ssize_t)i, item)) Py_CLEAR(result);
        else o.owners[i].to = (uint8_t *)PyBytes_AsString(made);
    }
    for (size_t row = 0; result && row < rows; row++) {
        uint32_t ordinal = (uint32_t)(begin + row);
        memcpy(o.owners[whose[row]].to, &ordinal, 4);
        o.owners[whose[row]].to += 4;
    }
    PyMem_Free(whose);
    PyMem_Free(o.owners);
    PyMem_Free(o.slots);
    PyBuffer_Release(&view);
    return result;
}
