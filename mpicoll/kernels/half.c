/* Reductions on float16 and bfloat16 for mpicoll: the module mpicoll.kernels._half.
 *
 * It knows buffers of bytes, neither NumPy nor MPI. The caller names the level (the
 * instruction set), so there is no state; levels() lists those that run on this machine,
 * best first. Those are in levels.h, the loops in loops.h; __init__.py says what each means.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "levels.h"

/* ---- Python ---- */

/* Asked once, since CPUID takes microseconds in a virtual machine. */
static int RUNS[NUMBER_OF_LEVELS];

/* Shorter loops keep the GIL: giving it back costs more than they do. */
#define SHORT 4096

#define UNLOCKED(count, call) \
    do { \
        if ((count) > SHORT) { \
            Py_BEGIN_ALLOW_THREADS call; \
            Py_END_ALLOW_THREADS \
        } else { \
            call; \
        } \
    } while (0)

/* Reads the arguments that all functions begin with: level, kind and a choice. */
static const struct level *begin(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted,
                                 long *kind, long *choice, long choices)
{
    long number;
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments expected, got %zd", wanted, given);
        return NULL;
    }
    number = PyLong_AsLong(args[0]);
    *kind = PyLong_AsLong(args[1]);
    *choice = PyLong_AsLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    if (number < 0 || number >= (long)NUMBER_OF_LEVELS || !RUNS[number]) {
        PyErr_Format(PyExc_ValueError, "level %ld does not run on this machine", number);
        return NULL;
    }
    if (*kind < 0 || *kind >= KINDS_END || *choice < 0 || *choice >= choices) {
        PyErr_Format(PyExc_ValueError, "no loop for kind %ld and choice %ld", *kind, *choice);
        return NULL;
    }
    return &LEVELS[number];
}

/* Takes the bytes of an object; those of a target must be whole items, those of a source
 * as many items as the target's. */
static int take(PyObject *object, Py_buffer *view, int flags, Py_ssize_t item, Py_ssize_t *count)
{
    if (PyObject_GetBuffer(object, view, flags) < 0)
        return -1;
    if (*count < 0 && view->len % item == 0) {
        *count = view->len / item;
    } else if (*count < 0 || view->len != *count * item) {
        if (*count < 0)
            PyErr_Format(PyExc_ValueError, "%zd bytes are not whole items of %zd", view->len,
                         item);
        else
            PyErr_Format(PyExc_ValueError, "an operand of %zd bytes where %zd are expected",
                         view->len, *count * item);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

/* reduce(level, kind, op, target, operands) */
static PyObject *half_reduce(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    enum { FEW = 8 };
    Py_buffer few_views[FEW], *views = few_views, target;
    const char *few_data[FEW], **data = few_data;
    long kind, op;
    Py_ssize_t number, taken = 0, count = -1;
    PyObject *operands, *result = NULL;
    const struct level *level = begin(args, given, 5, &kind, &op, OPS_END);
    (void)module;
    if (level == NULL)
        return NULL;
    operands = PySequence_Fast(args[4], "a sequence of operands expected");
    if (operands == NULL)
        return NULL;
    number = PySequence_Fast_GET_SIZE(operands);
    if (number < 2) {
        PyErr_SetString(PyExc_ValueError, "at least two operands expected");
        goto operands_done;
    }
    if (number > FEW) {
        views = PyMem_New(Py_buffer, number);
        data = PyMem_New(const char *, number);
        if (views == NULL || data == NULL) {
            PyErr_NoMemory();
            goto memory_done;
        }
    }
    if (take(args[3], &target, PyBUF_WRITABLE, 2, &count) < 0)
        goto memory_done;
    for (; taken < number; taken++) {
        PyObject *operand = PySequence_Fast_GET_ITEM(operands, taken);
        if (take(operand, &views[taken], PyBUF_SIMPLE, 2, &count) < 0)
            goto views_done;
        data[taken] = views[taken].buf;
    }
    if (number > 2 && (op == ADD || op == MULTIPLY)) {
        UNLOCKED(count * number,
                 level->fold((enum kind)kind, (enum op)op, target.buf, data, (size_t)number,
                             (size_t)count));
    } else {
        /* By pieces, which then stay in cache until the last operand. */
        const size_t piece = number > 2 ? 8 * PIECE : (size_t)count;
        UNLOCKED(count * number, for (size_t low = 0; low < (size_t)count; low += piece) {
            size_t length = (size_t)count - low < piece ? (size_t)count - low : piece;
            char *to = (char *)target.buf + 2 * low;
            level->two((enum kind)kind, (enum op)op, to, data[0] + 2 * low, data[1] + 2 * low,
                       length);
            for (Py_ssize_t k = 2; k < number; k++)
                level->two((enum kind)kind, (enum op)op, to, to, data[k] + 2 * low, length);
        });
    }
    result = Py_NewRef(Py_None);
views_done:
    while (taken > 0)
        PyBuffer_Release(&views[--taken]);
    PyBuffer_Release(&target);
memory_done:
    if (number > FEW) {
        PyMem_Free(views);
        PyMem_Free(data);
    }
operands_done:
    Py_DECREF(operands);
    return result;
}

/* Takes target and source of a function that has one of each. */
static int take_two(PyObject *const *args, Py_buffer *target, Py_ssize_t target_item,
                    Py_buffer *source, Py_ssize_t source_item, Py_ssize_t *count)
{
    *count = -1;
    if (take(args[0], target, PyBUF_WRITABLE, target_item, count) < 0)
        return -1;
    if (take(args[1], source, PyBUF_SIMPLE, source_item, count) < 0) {
        PyBuffer_Release(target);
        return -1;
    }
    return 0;
}

static PyObject *release(Py_buffer *target, Py_buffer *source)
{
    PyBuffer_Release(source);
    PyBuffer_Release(target);
    Py_RETURN_NONE;
}

/* scale(level, kind, divide, target, source, factor) */
static PyObject *half_scale(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer target, source;
    long kind, divide;
    Py_ssize_t count;
    double factor;
    const struct level *level = begin(args, given, 6, &kind, &divide, 2);
    (void)module;
    if (level == NULL)
        return NULL;
    factor = PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred() || take_two(args + 3, &target, 2, &source, 2, &count) < 0)
        return NULL;
    UNLOCKED(count, level->scale((enum kind)kind, (int)divide, target.buf, source.buf,
                                 (float)factor, (size_t)count));
    return release(&target, &source);
}

/* widen(level, kind, add, target, source) */
static PyObject *half_widen(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer target, source;
    long kind, add;
    Py_ssize_t count;
    const struct level *level = begin(args, given, 5, &kind, &add, 2);
    (void)module;
    if (level == NULL || take_two(args + 3, &target, 4, &source, 2, &count) < 0)
        return NULL;
    UNLOCKED(count, level->widen((enum kind)kind, (int)add, target.buf, source.buf,
                                 (size_t)count));
    return release(&target, &source);
}

/* narrow(level, kind, 0, target, source) */
static PyObject *half_narrow(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer target, source;
    long kind, unused;
    Py_ssize_t count;
    const struct level *level = begin(args, given, 5, &kind, &unused, 1);
    (void)module;
    if (level == NULL || take_two(args + 3, &target, 2, &source, 4, &count) < 0)
        return NULL;
    UNLOCKED(count, level->narrow((enum kind)kind, target.buf, source.buf, (size_t)count));
    return release(&target, &source);
}

/* levels() -> {name: number}, best first */
static PyObject *half_levels(PyObject *module, PyObject *unused)
{
    PyObject *levels = PyDict_New();
    (void)module;
    (void)unused;
    for (size_t number = 0; levels != NULL && number < NUMBER_OF_LEVELS; number++) {
        PyObject *value;
        if (!RUNS[number])
            continue;
        value = PyLong_FromSize_t(number);
        if (value == NULL || PyDict_SetItemString(levels, LEVELS[number].name, value) < 0)
            Py_CLEAR(levels);
        Py_XDECREF(value);
    }
    return levels;
}

#define FAST(name) (PyCFunction)(void (*)(void))name, METH_FASTCALL

static PyMethodDef METHODS[] = {
    {"levels", half_levels, METH_NOARGS, "levels() -> {name: number}, best first"},
    {"narrow", FAST(half_narrow), "narrow(level, kind, 0, target, source)"},
    {"reduce", FAST(half_reduce), "reduce(level, kind, op, target, operands)"},
    {"scale", FAST(half_scale), "scale(level, kind, divide, target, source, factor)"},
    {"widen", FAST(half_widen), "widen(level, kind, add, target, source)"},
    {NULL, NULL, 0, NULL},
};

static int half_exec(PyObject *module)
{
    (void)module;
    for (size_t number = 0; number < NUMBER_OF_LEVELS; number++)
        RUNS[number] = LEVELS[number].runs();
    return 0;
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, (void *)half_exec},
#if PY_VERSION_HEX >= 0x030c0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030d0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_half",
    .m_doc = "Loops on float16 and bfloat16; see mpicoll.kernels.",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__half(void);
PyMODINIT_FUNC PyInit__half(void)
{
    return PyModuleDef_Init(&MODULE);
}
