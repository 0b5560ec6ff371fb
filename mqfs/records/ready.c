/* `Ready`: the base of an iterator that gives out what it has received without a call of Python for each item.
 *
 * `_pop` is what is called for the next item, and raises IndexError where there is none; then, or while it is None, `_wait_next` of
 * the subclass gives the item, or ends the iteration. Both are held while they run: other threads may set `_pop` meanwhile. */
#include "native.h"
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    PyObject *pop;
} Ready;

static PyObject *ready_next(PyObject *self)
{
    PyObject *pop = ((Ready *)self)->pop;
    if (pop && pop != Py_None) {
        Py_INCREF(pop);
        PyObject *item = PyObject_CallNoArgs(pop);
        Py_DECREF(pop);
        if (item || !PyErr_ExceptionMatches(PyExc_IndexError)) return item;
        PyErr_Clear();
    }
    return PyObject_CallMethod(self, "_wait_next", NULL);
}

static void ready_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_CLEAR(((Ready *)self)->pop);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {{"_pop", T_OBJECT, offsetof(Ready, pop), 0, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_iter, (void *)PyObject_SelfIter}, {Py_tp_iternext, (void *)ready_next},
                              {Py_tp_dealloc, (void *)ready_dealloc}, {Py_tp_members, members}, {0, NULL}};
PyType_Spec ready_spec = {"mqfs.records._native.Ready", sizeof(Ready), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
