/* The ring for Python: making and attaching rings, and the module. The algorithm is in core.h. */
#include "module.h"
#include <pthread.h>
#include <stdio.h>

#ifndef SOURCE
#define SOURCE ""
#endif

struct errors errors;
PyTypeObject *ring_type, *consumer_type;
static Ring *rings; /* all that are open, for a forked child */

static void after_fork(void) /* locks of a description that a child keeps open would survive us */
{
    ring_self.thread = 0;
    for (Ring *ring = rings; ring; ring = ring->following) {
        close(ring->h.locks);
        close(ring->fd);
        ring->h.shared = NULL;
        ring->forked = 1;
    }
    rings = NULL;
}

void close_ring(Ring *self)
{
    if (!self->h.shared) return;
    for (Ring **at = &rings; *at; at = &(*at)->following)
        if (*at == self) { *at = self->following; break; }
    ring_unmap(&self->h);
    close(self->h.locks);
    close(self->fd);
}

/* ---- making and attaching ---- */

static int boot_id(uint8_t boot[16])
{
    char text[37] = {0};
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC), digits = 0;
    ssize_t got = fd < 0 ? -1 : read(fd, text, 36);
    if (fd >= 0) close(fd);
    memset(boot, 0, 16);
    for (int i = 0; i < got && digits < 32; i++) {
        int digit = text[i] >= '0' && text[i] <= '9' ? text[i] - '0' : text[i] >= 'a' && text[i] <= 'f' ? text[i] - 'a' + 10 : -1;
        if (digit < 0) continue;
        boot[digits / 2] = (uint8_t)(boot[digits / 2] << 4 | digit);
        digits++;
    }
    return digits == 32 || (PyErr_SetString(errors.bad_ring, "/proc/sys/kernel/random/boot_id cannot be read"), 0);
}

/* A ring object of `size` bytes that owns `fd`. Its locks are on an open file description that no other process has. */
static Ring *open_ring(int fd, uint64_t size)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    struct ring_handle h;
    int locks = open(path, O_RDWR | O_CLOEXEC);
    if (locks < 0 || ring_map(&h, locks, size)) {
        PyErr_SetFromErrno(PyExc_OSError);
        if (locks >= 0) close(locks);
        close(fd);
        return NULL;
    }
    Ring *ring = PyObject_New(Ring, ring_type);
    if (!ring) {
        ring_unmap(&h);
        close(locks);
        close(fd);
        return NULL;
    }
    ring->h = h;
    ring->fd = fd;
    ring->publishes = ring->users = ring->forked = 0;
    ring->following = rings;
    rings = ring;
    return ring;
}

static PyObject *allocate(int fd, uint64_t size)
{
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = ring_allocate(fd, size);
    Py_END_ALLOW_THREADS
    if (!error) Py_RETURN_NONE;
    errno = error;
    if (error == ENOSPC || error == EFBIG || error == ENOMEM) PyErr_SetString(errors.disk_full, "no memory for the ring");
    else PyErr_SetFromErrno(PyExc_OSError);
    return NULL;
}

static PyObject *native_create(PyObject *module, PyObject *args, PyObject *keywords)
{
    (void)module;
    static char *names[] = {"size", "generation", "sequence", "time_ns", NULL};
    unsigned long long size, generation = 1, sequence = 1;
    long long time_ns = 0;
    uint8_t boot[16];
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "K|$KKL", names, &size, &generation, &sequence, &time_ns)) return NULL;
    if (!ring_size_fits(size)) return PyErr_SetString(errors.bad_ring, "invalid size (expected a power of two from 64 KiB to 4 GiB)"), NULL;
    if (!sequence || !boot_id(boot)) return PyErr_Occurred() ? NULL : (PyErr_SetString(errors.bad_ring, "sequence 0 (expected 1 or more)"), NULL);
    int fd = (int)syscall(SYS_memfd_create, "mqfs-ring", 1u | 2u); /* MFD_CLOEXEC | MFD_ALLOW_SEALING */
    if (fd < 0) return PyErr_SetFromErrno(PyExc_OSError);
    PyObject *done = allocate(fd, size);
    if (!done || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
        if (done) PyErr_SetFromErrno(PyExc_OSError);
        Py_XDECREF(done);
        close(fd);
        return NULL;
    }
    Py_DECREF(done);
    Ring *ring = open_ring(fd, size);
    if (!ring) return NULL;
    ring->generation = generation;
    ring_make(ring->h.shared, size, generation, boot, sequence, time_ns);
    return (PyObject *)ring;
}

static PyObject *native_attach(PyObject *module, PyObject *args, PyObject *keywords)
{
    (void)module;
    static char *names[] = {"fd", "generation", NULL};
    PyObject *wanted = Py_None;
    struct ring_fixed fixed;
    struct stat stat;
    uint8_t boot[16];
    uint64_t generation = 0;
    int given;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "i|O", names, &given, &wanted) || !boot_id(boot)) return NULL;
    if (wanted != Py_None && !number(wanted, UINT64_MAX, &generation)) return NULL;
    int seals = fcntl(given, F_GET_SEALS), must = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (seals < 0 && errno == EBADF) return PyErr_SetFromErrno(PyExc_OSError);
    if (seals < 0 || (seals & must) != must) return PyErr_SetString(errors.bad_ring, "not sealed"), NULL;
    if (fstat(given, &stat)) return PyErr_SetFromErrno(PyExc_OSError);
    if (pread(given, &fixed, sizeof fixed, 0) != sizeof fixed) return PyErr_SetString(errors.bad_ring, "too short"), NULL;
    const char *wrong = ring_check(&fixed, (uint64_t)stat.st_size, boot);
    if (wrong) return PyErr_SetString(errors.bad_ring, wrong), NULL;
    if (wanted != Py_None && generation != fixed.generation) return PyErr_SetString(errors.stale, "another generation of the ring"), NULL;
    int fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return PyErr_SetFromErrno(PyExc_OSError);
    Ring *ring = open_ring(fd, fixed.size);
    if (ring) ring->generation = fixed.generation;
    return (PyObject *)ring;
}

static PyObject *native_crc32c(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer view;
    unsigned int crc = 0;
    int table = 0;
    if (!PyArg_ParseTuple(args, "y*|Ip", &view, &crc, &table)) return NULL;
    crc = table ? ~crc_by_table(~crc, view.buf, (size_t)view.len) : crc32c(crc, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *native_allocate(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long size;
    int fd;
    return PyArg_ParseTuple(args, "iK", &fd, &size) ? allocate(fd, size) : NULL;
}

static PyObject *native_stop_at(PyObject *module, PyObject *args)
{
    (void)module;
    if (!PyArg_ParseTuple(args, "ii", &ring_stop_at, &ring_stop_signal)) return NULL;
    Py_RETURN_NONE;
}

/* ---- the module ---- */

static PyMethodDef functions[] = {
    {"create", FAST(native_create), METH_VARARGS | METH_KEYWORDS, NULL},
    {"attach", FAST(native_attach), METH_VARARGS | METH_KEYWORDS, NULL},
    {"scan", FAST(native_scan), METH_FASTCALL, NULL},
    {"ordered", FAST(native_ordered), METH_FASTCALL, NULL},
    {"plain", FAST(native_plain), METH_FASTCALL, NULL},
    {"shift", FAST(native_shift), METH_FASTCALL, NULL},
    {"bell", native_bell, METH_VARARGS, NULL},
    {"wait_any", native_wait_any, METH_VARARGS, NULL},
    {"crc32c", native_crc32c, METH_VARARGS, NULL},
    {"_allocate", native_allocate, METH_VARARGS, NULL},
    {"_stop_at", native_stop_at, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL}};

static int begin(PyObject *module)
{
    static const struct { const char *name; PyObject **to; } named[] = {
        {"Again", &errors.again}, {"BadRing", &errors.bad_ring}, {"Busy", &errors.busy}, {"Damaged", &errors.damaged},
        {"Disconnected", &errors.disconnected}, {"DiskFull", &errors.disk_full}, {"FellBehind", &errors.fell_behind},
        {"OverLimit", &errors.over_limit}, {"Stale", &errors.stale}};
    PyObject *table = PyImport_ImportModule("mqfs.errors");
    for (size_t i = 0; table && i < sizeof named / sizeof *named; i++)
        if (!(*named[i].to = PyObject_GetAttrString(table, named[i].name))) Py_CLEAR(table);
    if (!table) return -1;
    Py_DECREF(table);
    crc_begin();
    if (pthread_atfork(NULL, NULL, after_fork)) return PyErr_NoMemory(), -1;
    ring_type = (PyTypeObject *)PyType_FromSpec(&ring_spec);
    consumer_type = (PyTypeObject *)PyType_FromSpec(&consumer_spec);
    return !ring_type || !consumer_type || PyModule_AddObjectRef(module, "Ring", (PyObject *)ring_type) ||
           PyModule_AddObjectRef(module, "Consumer", (PyObject *)consumer_type) ||
           PyModule_AddIntConstant(module, "RECORD_HEAD", sizeof(struct ring_record)) ||
           PyModule_AddIntConstant(module, "HEAD_BYTES", RING_HEAD_BYTES) || PyModule_AddIntConstant(module, "STOPS", STOPS) ||
           PyModule_AddIntConstant(module, "SLOTS", RING_SLOTS) || PyModule_AddIntConstant(module, "CRC_BY_CPU", crc_cpu) ||
           PyModule_AddStringConstant(module, "SOURCE", SOURCE)
               ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)begin}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "mqfs.ring._native", NULL, 0, functions, module_slots,
                                        NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
