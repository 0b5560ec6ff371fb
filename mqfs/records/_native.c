/* The codec of logs: frames to records (frames.c, batch.c), rows to postings (postings.c), runs of records to columns (columns.c)
 * and to messages (messages.c), and the iterator that gives these out (ready.c). */
#include "native.h"
#include "crc32c.h"
#ifndef SOURCE
#define SOURCE ""
#endif
#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef functions[] = {
    {"pack", FAST(native_pack), METH_FASTCALL, NULL},
    {"frames", native_frames, METH_O, NULL},
    {"stamp", FAST(native_stamp), METH_FASTCALL, NULL},
    {"unit", FAST(native_unit), METH_FASTCALL, NULL},
    {"tally", FAST(native_tally), METH_FASTCALL, NULL},
    {"total", FAST(native_total), METH_FASTCALL, NULL},
    {"postings", FAST(native_postings), METH_FASTCALL, NULL},
    {"columns", native_columns, METH_VARARGS, NULL},
    {"pick", native_pick, METH_VARARGS, NULL},
    {"search", FAST(native_search), METH_FASTCALL, NULL},
    {"messages", FAST(native_messages), METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL}};

static int begin(PyObject *module)
{
    crc_begin();
    if (postings_begin()) return -1;
    PyObject *ready = PyType_FromSpec(&ready_spec);
    if (!ready || PyModule_AddObjectRef(module, "Ready", ready)) return -1;
    Py_DECREF(ready);
    return PyModule_AddStringConstant(module, "SOURCE", SOURCE);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)begin}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, functions, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
