/* The inner loops of a heap walk. `walk.py` and `kinds.py` do the same without it and are the reference.

   An object is asked for its referents by the rule of `gc.get_referents`: by its type's tp_traverse, where the type has one and
   the object is under the garbage collector's rules (tp_is_gc: a static type is not, and its tp_traverse ends the process).
   While a tp_traverse runs nothing of Python's is made and no Python runs. Between two of them Python may run (a type that has
   not been seen yet is classified there), so each object that waits on a stack is referred to. Nothing here recurses.

   Everything used is of the limited API of Python 3.10; PyPy and builds without the GIL have no use for it. References are counted
   by the functions of the Python that runs: the macros of the one that compiled this, Py_INCREF and the like, would count those
   of None, small numbers and classes, too, which are immortal from Python 3.12 on. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#ifdef Py_GIL_DISABLED
#error "without the GIL an object must not be traversed while other threads run"
#endif

#define INTERFACE 5 /* native.py takes no other */

/* How the instances of a type are walked: `_ways` in native.py. */
enum way {
    LEAF = 0,    /* not at all */
    CLASS = 1,   /* a class: a user's is walked */
    OBJECT = 2,  /* by their referents */
    PLAIN = 3,   /* the same; as part of plain data they are passed over */
    BULK = 4,    /* the same; a large one is examined first: is it plain data? */
    SPECIAL = 5, /* by Python code */
    TENSOR = 6,  /* by Python code, and only so many of them */
};

#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

static int no_memory(void)
{
    PyErr_NoMemory();
    return -1;
}

/* --- Tables by address, with open addressing: sets of objects, and findings about types. The first member of an entry is its
   key, NULL in an empty one. `width`, the bytes of an entry, is a constant wherever these are called. */

typedef struct {
    char *entries;
    size_t mask; /* the number of entries, empty ones too, less one */
    size_t used;
} Table;

/* Return the entry of a key, or the empty one where it belongs. Neighbours in the heap are neighbours in the table, block by
   block of a mebibyte: it is the cache that counts here. */
static inline void *entry_of(const Table *table, size_t width, const void *key)
{
    size_t at = (size_t)key >> 4;
    for (at = (at + (at >> 16) * 0x9E3779B1u) & table->mask;; at = (at + 1) & table->mask) {
        void **entry = (void **)(table->entries + at * width);
        if (*entry == NULL || *entry == key) {
            return entry;
        }
    }
}

static inline int has_room(const Table *table)
{
    return table->entries != NULL && 2 * table->used <= table->mask;
}

static int grow(Table *table, size_t width)
{
    Table more = {NULL, table->entries == NULL ? 1023 : 2 * table->mask + 1, table->used};
    more.entries = calloc(more.mask + 1, width);
    if (more.entries == NULL) {
        return no_memory();
    }
    for (size_t old = 0; table->entries != NULL && old <= table->mask; old++) {
        void **entry = (void **)(table->entries + old * width);
        if (*entry != NULL) {
            memcpy(entry_of(&more, width, *entry), entry, width);
        }
    }
    free(table->entries);
    *table = more;
    return 0;
}

static void table_free(Table *table)
{
    free(table->entries);
    memset(table, 0, sizeof(*table));
}

static int set_has(const Table *set, const void *key)
{
    return set->entries != NULL && *(void **)entry_of(set, sizeof(void *), key) != NULL;
}

/* Return 1 for a new key, 0 for one that was there, -1 without memory. */
static int set_add(Table *set, void *key)
{
    if (!has_room(set) && grow(set, sizeof(void *)) < 0) {
        return -1;
    }
    void **entry = entry_of(set, sizeof(void *), key);
    int is_new = *entry == NULL;
    *entry = key;
    set->used += is_new;
    return is_new;
}

typedef struct {
    void *type;
    traverseproc traverse;
    inquiry is_gc;
    PyObject *kind;
    int way;
} Finding;

static Finding *find(const Table *types, const PyTypeObject *type)
{
    return entry_of(types, sizeof(Finding), type);
}

/* --- A stack of objects, each of them referred to. */

typedef struct {
    PyObject **items;
    size_t length, room;
} Stack;

static int push(Stack *stack, PyObject *obj)
{
    if (stack->length == stack->room) {
        size_t room = stack->room ? 2 * stack->room : 256;
        PyObject **items = realloc(stack->items, room * sizeof(PyObject *));
        if (items == NULL) {
            return no_memory();
        }
        stack->items = items;
        stack->room = room;
    }
    Py_IncRef(obj);
    stack->items[stack->length++] = obj;
    return 0;
}

static void stack_clear(Stack *stack)
{
    while (stack->length) {
        Py_DecRef(stack->items[--stack->length]);
    }
}

static void stack_free(Stack *stack)
{
    stack_clear(stack);
    free(stack->items);
    memset(stack, 0, sizeof(*stack));
}

/* --- The walker: what it knows of types and classes, for one scan. */

typedef struct {
    PyObject_HEAD
    PyObject *classify;       /* a type -> (way, kind); it keeps the type alive */
    PyObject *is_users_class; /* a class -> bool: it is walked */
    PyObject *is_dull_class;  /* a class -> bool: it leads to plain data and code alone */
    Table types, library_classes, dull_classes; /* findings, and two sets */
    Py_ssize_t bulk; /* references from which on a container is examined */
    Py_ssize_t room; /* objects behind each reference, on average, that are examined */
} Walker;

/* Return what is known of a type, after asking Python about a new one; NULL with an exception. */
static Finding *finding_of(Walker *self, PyTypeObject *type)
{
    Finding *found = find(&self->types, type);
    if (found->type != NULL) {
        return found;
    }
    int way;
    PyObject *kind, *answer = PyObject_CallFunctionObjArgs(self->classify, (PyObject *)type, NULL);
    int failed = answer == NULL || !PyArg_ParseTuple(answer, "iO", &way, &kind);
    if (failed || (!has_room(&self->types) && grow(&self->types, sizeof(Finding)) < 0)) {
        Py_DecRef(answer);
        return NULL;
    }
    found = find(&self->types, type);
    if (found->type == NULL) {
        int has_gc = (PyType_GetFlags(type) & Py_TPFLAGS_HAVE_GC) != 0;
        found->type = type;
        found->traverse = has_gc ? (traverseproc)PyType_GetSlot(type, Py_tp_traverse) : NULL;
        found->is_gc = has_gc ? (inquiry)PyType_GetSlot(type, Py_tp_is_gc) : NULL;
        Py_IncRef(kind);
        found->kind = kind;
        found->way = way;
        self->types.used++;
    }
    Py_DecRef(answer);
    return found;
}

/* Call `visit` with each referent of an object, as gc.get_referents does. */
static int traverse(const Finding *found, PyObject *obj, visitproc visit, void *state)
{
    if (found->traverse == NULL || (found->is_gc != NULL && !found->is_gc(obj))) {
        return 0;
    }
    return found->traverse(obj, visit, state);
}

/* Ask Python about a class once: `known` are those that need not be looked at. Return whether this one is to be, or -1 with an
   exception. Nearly every object refers to its class. */
static int ask_about_class(PyObject *question, int dull, Table *known, PyObject *cls)
{
    if (set_has(known, cls)) {
        return 0;
    }
    PyObject *answer = PyObject_CallFunctionObjArgs(question, cls, NULL);
    int said = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_DecRef(answer);
    return said < 0 || (said == dull && set_add(known, cls) < 0) ? -1 : said != dull;
}

/* --- Large containers of plain data are passed over. */

typedef struct {
    const Walker *walker;
    Table seen;
    Stack todo;
    Py_ssize_t left; /* referents that may still be examined */
    int is_plain;
    int failed;
} Examination;

static int visit_plain(PyObject *obj, void *state)
{
    Examination *exam = state;
    if (obj == NULL) {
        return 0;
    }
    const Finding *found = find(&exam->walker->types, Py_TYPE(obj));
    int way = found->type == NULL ? PLAIN : found->way; /* a new type is classified later */
    if (way == LEAF || (way == CLASS && set_has(&exam->walker->dull_classes, obj))) {
        return 0;
    }
    if (way == OBJECT || way >= SPECIAL || --exam->left < 0) {
        exam->is_plain = 0;
        return 1;
    }
    if (Py_REFCNT(obj) != 1) { /* else only this container refers to it: nothing can lead here again */
        int is_new = set_add(&exam->seen, obj);
        if (is_new <= 0) {
            exam->failed |= is_new < 0;
            return is_new < 0;
        }
    }
    exam->failed |= push(&exam->todo, obj) < 0;
    return exam->failed;
}

/* Say whether a container leads to plain data alone; -1 with an exception. */
static int is_plain_below(Walker *self, PyObject *top, Py_ssize_t referents)
{
    Examination exam = {.walker = self, .left = self->room * (referents + self->bulk), .is_plain = 1};
    exam.failed = push(&exam.todo, top) < 0;
    while (exam.todo.length && exam.is_plain && !exam.failed) {
        PyObject *obj = exam.todo.items[--exam.todo.length];
        const Finding *found = finding_of(self, Py_TYPE(obj));
        if (found == NULL) {
            exam.failed = 1;
        } else if (found->way == CLASS) {
            int leads_on = ask_about_class(self->is_dull_class, 1, &self->dull_classes, obj);
            exam.failed = leads_on < 0;
            exam.is_plain = leads_on == 0;
        } else if (found->way == PLAIN || found->way == BULK) {
            traverse(found, obj, visit_plain, &exam);
        } else {
            exam.is_plain = found->way == LEAF;
        }
        Py_DecRef(obj);
    }
    stack_free(&exam.todo);
    table_free(&exam.seen);
    return exam.failed ? -1 : exam.is_plain;
}

/* --- The walk itself. */

typedef struct {
    const Walker *walker;
    Stack *children;
    Py_ssize_t referents;
    int failed;
} Collection;

static int visit_child(PyObject *obj, void *state)
{
    Collection *found = state;
    if (obj == NULL) {
        return 0;
    }
    found->referents++;
    const Finding *of_type = find(&found->walker->types, Py_TYPE(obj));
    int way = of_type->type == NULL ? OBJECT : of_type->way;
    if (way == LEAF || (way == CLASS && set_has(&found->walker->library_classes, obj))) {
        return 0;
    }
    found->failed |= push(found->children, obj) < 0;
    return found->failed;
}

/* The walk's own lists and dicts, and what this call has done with them. */
typedef struct {
    PyObject *objects, *kinds, *number, *stop;
    Py_ssize_t tensors; /* that have been added */
    Py_ssize_t most_tensors;
} State;

/* Number a new object, and append its number. Return -1 with an exception. */
static int add(State *walk, PyObject *key, PyObject *obj, PyObject *kind, PyObject *numbers)
{
    PyObject *number = PyLong_FromSsize_t(PyList_Size(walk->objects));
    int failed = number == NULL || PyDict_SetItem(walk->number, key, number) < 0 || PyList_Append(walk->objects, obj) < 0
                 || PyList_Append(walk->kinds, kind) < 0 || PyList_Append(numbers, number) < 0;
    Py_DecRef(number);
    return failed ? -1 : 0;
}

/* Append the number of an object, new or known, if it is walked. Return -1 with an exception. */
static int append_number(Walker *self, State *walk, PyObject *obj, PyObject *numbers)
{
    const Finding *found = finding_of(self, Py_TYPE(obj));
    if (found == NULL) {
        return -1;
    }
    int way = found->way; /* the finding may move when Python is asked */
    PyObject *kind = found->kind;
    if (way == LEAF || (way == CLASS && set_has(&self->library_classes, obj))) {
        return 0;
    }
    PyObject *key = PyLong_FromVoidPtr(obj);
    PyObject *known = key == NULL ? NULL : PyDict_GetItemWithError(walk->number, key);
    int failed = known == NULL ? PyErr_Occurred() != NULL : PyList_Append(numbers, known) < 0;
    if (known == NULL && !failed) {
        int stops = PySet_Contains(walk->stop, key);
        int walked = stops || way != CLASS ? !stops : ask_about_class(self->is_users_class, 0, &self->library_classes, obj);
        failed = stops < 0 || walked < 0 || (walked && add(walk, key, obj, kind, numbers) < 0);
        walk->tensors += way == TENSOR && walked && !failed;
    }
    Py_DecRef(key);
    return failed ? -1 : 0;
}

/* Return the list of the numbers of `children`; NULL with an exception. */
static PyObject *numbers_of(Walker *self, State *walk, const Stack *children)
{
    PyObject *numbers = PyList_New(0);
    for (size_t n = 0; numbers != NULL && n < children->length; n++) {
        if (append_number(self, walk, children->items[n], numbers) < 0) {
            Py_DecRef(numbers);
            numbers = NULL;
        }
    }
    return numbers;
}

/* Say whether an object is for Python to look into: by its type, by what has been noted of it, or as it may have too many
   tensors; -1 with an exception. */
static int is_for_python(Walker *self, State *walk, PyObject *later, Py_ssize_t at, const Stack *children)
{
    if (PyDict_Size(later)) {
        PyObject *key = PyLong_FromSsize_t(at);
        int noted = key == NULL ? -1 : PyDict_Contains(later, key);
        Py_DecRef(key);
        if (noted) {
            return noted;
        }
    }
    Py_ssize_t tensors = walk->tensors;
    for (size_t n = 0; n < children->length; n++) {
        const Finding *found = finding_of(self, Py_TYPE(children->items[n]));
        if (found == NULL) {
            return -1;
        }
        tensors += found->way == TENSOR;
    }
    return tensors > walk->tensors && tensors > walk->most_tensors;
}

PyDoc_STRVAR(follow_doc, "\
follow((objects, kinds, number, children), stop, later, until, most_tensors) -> tensors\n\n\
Look into the numbered objects from number len(children) on, up to `until` or to one that is for Python to look into.\n\
Return how many tensors have been numbered: at most `most_tensors`.");

static PyObject *walker_follow(Walker *self, PyObject *args)
{
    State walk = {0};
    PyObject *later, *lists;
    Py_ssize_t until;
    if (!PyArg_ParseTuple(args, "(O!O!O!O!)OO!nn", &PyList_Type, &walk.objects, &PyList_Type, &walk.kinds, &PyDict_Type,
                          &walk.number, &PyList_Type, &lists, &walk.stop, &PyDict_Type, &later, &until,
                          &walk.most_tensors)) {
        return NULL;
    }
    Stack children = {0};
    int result = 0; /* 1: the rest is for Python, or another time; -1: an exception */
    for (Py_ssize_t at = PyList_Size(lists); !result && at < until && at < PyList_Size(walk.objects); at++) {
        PyObject *obj = PyList_GetItem(walk.objects, at);
        const Finding *found = obj == NULL ? NULL : finding_of(self, Py_TYPE(obj));
        if (found == NULL) {
            result = -1;
            break;
        }
        if (found->way >= SPECIAL) {
            break;
        }
        Collection met = {self, &children, 0, 0};
        traverse(found, obj, visit_child, &met);
        if (!met.referents && PyDict_CheckExact(obj) && PyDict_Size(obj)) {
            break; /* the values of an object's dict are the object's */
        }
        int is_plain = 0;
        if (found->way == BULK && met.referents >= self->bulk && !met.failed) {
            is_plain = is_plain_below(self, obj, met.referents);
        }
        if (is_plain > 0) {
            stack_clear(&children);
        }
        result = met.failed || is_plain < 0 ? -1 : is_for_python(self, &walk, later, at, &children);
        if (!result) {
            PyObject *numbers = numbers_of(self, &walk, &children);
            result = numbers == NULL || PyList_Append(lists, numbers) < 0 ? -1 : 0;
            Py_DecRef(numbers);
        }
        stack_clear(&children);
    }
    stack_free(&children);
    return result < 0 ? NULL : PyLong_FromSsize_t(walk.tensors);
}

static int walker_init(Walker *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"classify", "is_users_class", "is_dull_class", "bulk", "room", NULL};
    PyObject *classify, *is_users_class, *is_dull_class;
    Py_ssize_t bulk, room;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOnn", names, &classify, &is_users_class, &is_dull_class, &bulk,
                                     &room)) {
        return -1;
    }
    if (self->classify != NULL) {
        PyErr_SetString(PyExc_TypeError, "a walker is made once");
        return -1;
    }
    if (grow(&self->types, sizeof(Finding)) < 0) {
        return -1;
    }
    Py_IncRef(classify);
    Py_IncRef(is_users_class);
    Py_IncRef(is_dull_class);
    self->classify = classify;
    self->is_users_class = is_users_class;
    self->is_dull_class = is_dull_class;
    self->bulk = bulk;
    self->room = room;
    return 0;
}

static void walker_dealloc(Walker *self)
{
    for (size_t at = 0; self->types.entries != NULL && at <= self->types.mask; at++) {
        Py_DecRef(((Finding *)self->types.entries)[at].kind);
    }
    table_free(&self->types);
    table_free(&self->library_classes);
    table_free(&self->dull_classes);
    Py_DecRef(self->classify);
    Py_DecRef(self->is_users_class);
    Py_DecRef(self->is_dull_class);
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DecRef((PyObject *)type);
}

static PyMethodDef walker_methods[] = {
    {"follow", (PyCFunction)walker_follow, METH_VARARGS, follow_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot walker_slots[] = {
    {Py_tp_doc, "What one scan knows of types and classes, and the loops that need it."},
    {Py_tp_init, walker_init},
    {Py_tp_dealloc, walker_dealloc},
    {Py_tp_methods, walker_methods},
    {0, NULL},
};

static PyType_Spec walker_spec = {
    "nbguard.memory.scan.heap._heapwalk.Walker", sizeof(Walker), 0, Py_TPFLAGS_DEFAULT, walker_slots,
};

static int module_exec(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &walker_spec, NULL);
    int failed = type == NULL || PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0
                 || PyModule_AddObjectRef(module, "Walker", type) < 0;
    Py_DecRef(type);
    return failed ? -1 : 0;
}

/* --- Passes over a list of objects. */

#define PIECE 16384 /* objects that stay in the processor's cache from the look at them until they are let go */
#define AHEAD 32    /* objects that are on their way from memory, which takes as long as all the rest of a look at one */

PyDoc_STRVAR(take_doc, "\
take(objects, is_wanted) -> list\n\n\
Return those of a list of objects whose type is wanted, and empty it. `is_wanted` is asked about each type once, and keeps it.");

static PyObject *module_take(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *objects, *question;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &objects, &question)) {
        return NULL;
    }
    PyObject *found = PyList_New(0), *obj;
    Table wanted = {0}, others = {0};
    int failed = found == NULL;
    for (Py_ssize_t end = PyList_Size(objects), at = end; end > 0 && !failed; end = at = PyList_Size(objects)) {
        Py_ssize_t start = end > PIECE ? end - PIECE : 0;
        while (at-- > start && !failed) {
            if (at >= AHEAD) {
                PREFETCH(PyList_GetItem(objects, at - AHEAD));
            }
            if ((obj = PyList_GetItem(objects, at)) == NULL) {
                failed = 1;
            } else if (!set_has(&others, Py_TYPE(obj))) {
                PyObject *type = (PyObject *)Py_TYPE(obj);
                int is_wanted = set_has(&wanted, type) ? 1 : ask_about_class(question, 0, &others, type);
                failed = is_wanted < 0 || (is_wanted && (set_add(&wanted, type) < 0 || PyList_Append(found, obj) < 0));
            }
        }
        failed = failed || PyList_SetSlice(objects, start, end, NULL) < 0;
    }
    table_free(&wanted);
    table_free(&others);
    if (failed || PyList_Reverse(found) < 0) {
        Py_DecRef(found);
        found = NULL;
    }
    return found;
}

static int visit_asked(PyObject *obj, void *asked)
{
    return obj != NULL && set_has(asked, obj);
}

#define NEAR 10000 /* objects that are passed over again after each holder: many were made together with theirs */

static int may_go_on(PyObject *obj, PyObject *ends)
{
    PyObject *address = PyLong_FromVoidPtr(obj);
    int is_end = address == NULL ? -1 : PySet_Contains(ends, address);
    Py_DecRef(address);
    return is_end < 0 ? -1 : !is_end && !PyType_Check(obj);
}

PyDoc_STRVAR(referrers_doc, "\
referrers(objects, asked, ends, passes, most) -> (list, list, int)\n\n\
Return those of a list of tracked objects that refer to any of the list `asked`, and to these in turn, as far as\n\
`passes` over `objects` show it, and those among them that were followed: all their referrers are there. A class and an\n\
object whose address is in the set `ends` is not followed, nor are more than `most` objects. Last, the passes left.");

static PyObject *module_referrers(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *objects, *list, *ends;
    Py_ssize_t passes, most;
    if (!PyArg_ParseTuple(args, "O!O!O!nn", &PyList_Type, &objects, &PyList_Type, &list, &PySet_Type, &ends, &passes, &most)) {
        return NULL;
    }
    PyObject *found = PyList_New(0), *followed = PyList_New(0);
    Table asked = {0};
    int failed = found == NULL || followed == NULL, is_new = 1, back = 1;
    for (Py_ssize_t at = 0; at < PyList_Size(list) && !failed; at++) {
        failed = set_add(&asked, PyList_GetItem(list, at)) < 0;
    }
    /* To and fro, and back a little after each: holders made one after the other are found in few passes. The last pass, which
       follows no more, has them all. */
    while (is_new && !failed) {
        int is_last = --passes <= 0;
        is_new = 0;
        back = !back;
        failed = PyList_SetSlice(found, 0, PyList_Size(found), NULL) < 0;
        for (Py_ssize_t n = 0, end = PyList_Size(objects); n < end && !failed; n++) {
            if (n + AHEAD < end) {
                PREFETCH(PyList_GetItem(objects, back ? end - 1 - n - AHEAD : n + AHEAD));
            }
            PyObject *obj = PyList_GetItem(objects, back ? end - 1 - n : n);
            traverseproc refers = (traverseproc)PyType_GetSlot(Py_TYPE(obj), Py_tp_traverse);
            if (refers == NULL || !refers(obj, visit_asked, &asked)) {
                continue;
            }
            failed = PyList_Append(found, obj) < 0;
            if (!failed && !is_last && PyList_Size(followed) < most && !set_has(&asked, obj)) {
                int goes_on = may_go_on(obj, ends);
                failed = goes_on < 0 || (goes_on && (PyList_Append(followed, obj) < 0 || set_add(&asked, obj) < 0));
                if (goes_on > 0) {
                    is_new = 1;
                    n -= n < NEAR ? n : NEAR;
                }
            }
        }
    }
    table_free(&asked);
    if (failed || (back && PyList_Reverse(found) < 0)) {
        Py_DecRef(found);
        Py_DecRef(followed);
        return NULL;
    }
    return Py_BuildValue("(NNn)", found, followed, passes);
}

static PyMethodDef module_methods[] = {
    {"take", module_take, METH_VARARGS, take_doc},
    {"referrers", module_referrers, METH_VARARGS, referrers_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_heapwalk",
    .m_doc = "The inner loops of a heap walk.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__heapwalk(void)
{
    return PyModuleDef_Init(&module_def);
}
