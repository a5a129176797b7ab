// The CPython module margay._C: arguments to tensor views, status to exceptions, nothing else. Limited API 3.10.
//
// Tensors come in through the C exchange table of their type, without a copy, an allocation or a synchronisation, or
// through __dlpack__ where the type has no table of its own. Views live as long as the call, which holds the objects.
// No Python code runs between the first borrowed view and the op: it could free or resize what was viewed. So numbers
// come first, exports next, tables last.
#include "Python.h"
#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include "dlpack.h"
#include "runtime/driver.h"

enum { MAX_TYPES = 8, MAX_TENSORS = MG_MAX_ARGS };

typedef struct state {
  atomic_int types;                 // entries published; an entry never changes, and holds its type for ever
  atomic_flag adding;
  struct { PyObject *type; const dl_exchange *table; } type[MAX_TYPES];
} state;

// ---- errors

static PyObject *raise_status(mg_status status) {
  PyObject *const kinds[] = {[MG_TYPE] = PyExc_TypeError, [MG_VALUE] = PyExc_ValueError,
                             [MG_UNSUPPORTED] = PyExc_NotImplementedError,
                             [MG_BUFFER] = PyExc_BufferError, [MG_MEMORY] = PyExc_MemoryError,
                             [MG_RUNTIME] = PyExc_RuntimeError};
  PyErr_SetString(kinds[status], mg_last_error());
  return NULL;
}

static PyObject *none_or_raise(mg_status status) { return status ? raise_status(status) : Py_NewRef(Py_None); }

// Put "op: argument" before the first line of the pending exception's message; what follows may be a producer's stack.
static void blame(const char *op, const char *name) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject *message = value ? PyObject_Str(value) : NULL;
  Py_ssize_t length = message ? PyUnicode_GetLength(message) : 0,
             end = message ? PyUnicode_FindChar(message, '\n', 0, length, 1) : 0;
  PyObject *line = message ? PyUnicode_Substring(message, 0, end < 0 ? length : end) : NULL;
  PyErr_Clear();
  PyObject *whole = PyUnicode_FromFormat("%s: %s: %S", op, name, line ? line : Py_None);
  PyObject *blamed = whole ? PyObject_CallFunctionObjArgs(type, whole, NULL) : NULL;
  if (blamed && PyObject_IsInstance(blamed, type) == 1) {
    PyErr_SetObject(type, blamed);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
  } else {                          // a class that is not made from one string: as it was raised
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
  }
  Py_XDECREF(message);
  Py_XDECREF(line);
  Py_XDECREF(whole);
  Py_XDECREF(blamed);
}

// ---- exchange tables

// A new reference, or NULL without an exception
static PyObject *attribute_of_type(PyObject *type, const char *name) {
  PyObject *found = PyObject_GetAttrString(type, name);
  if (!found) PyErr_Clear();
  return found;
}

static bool attribute_is(PyObject *type, const char *name, const char *value) {
  PyObject *found = attribute_of_type(type, name);
  bool same = found && PyUnicode_Check(found) && !PyUnicode_CompareWithASCIIString(found, value);
  Py_XDECREF(found);
  return same;
}

// Subclasses inherit the attribute, but may be no plain memory (FakeTensor, DTensor): only the type that defines it
// counts, and torch.nn.Parameter, which is a Tensor in all but name.
static bool owns_table(PyObject *type) {
  PyObject *dict = attribute_of_type(type, "__dict__");
  bool owns = dict && PyMapping_HasKeyString(dict, "__dlpack_c_exchange_api__");
  Py_XDECREF(dict);
  return owns || (attribute_is(type, "__module__", "torch.nn.parameter") &&
                  attribute_is(type, "__qualname__", "Parameter"));
}

static const dl_exchange *find_table(PyObject *type) {
  if (!owns_table(type)) return NULL;
  PyObject *capsule = attribute_of_type(type, "__dlpack_c_exchange_api__");
  const dl_exchange *table = NULL;
  if (capsule && PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
    table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_XDECREF(capsule);              // the table is static for the life of the process
  while (table && table->version.major != DL_MAJOR) table = table->previous;
  return table && table->borrow ? table : NULL;
}

static const dl_exchange *table_of(state *s, PyObject *object) {
  PyObject *type = (PyObject *)Py_TYPE(object);
  int known = atomic_load_explicit(&s->types, memory_order_acquire);
  for (int i = 0; i < known; i++)
    if (s->type[i].type == type) return s->type[i].table;
  const dl_exchange *table = find_table(type);
  if (atomic_flag_test_and_set(&s->adding)) return table;   // another thread adds a type; a later
                                                            // call will add this one
  known = atomic_load(&s->types);
  if (known < MAX_TYPES) {
    s->type[known].type = Py_NewRef(type);
    s->type[known].table = table;
    atomic_store_explicit(&s->types, known + 1, memory_order_release);
  }
  atomic_flag_clear(&s->adding);
  return table;
}

// ---- tensors

typedef struct args {               // the tensors of one call
  const char *op;
  mg_tensor tensor[MAX_TENSORS];
  const mg_tensor *view[MAX_TENSORS];     // into `tensor`; NULL for None
  PyObject *capsule[MAX_TENSORS];         // exports by __dlpack__, held until the call is over
  const dl_exchange *stream_table;        // of the first CUDA tensor
  int count;
} args;

static bool set_dtype(mg_tensor *t, const dl_tensor *d) {
  static const struct { uint8_t code, bits; mg_dtype dtype; } known[] = {
    {DL_BFLOAT, 16, MG_BF16}, {DL_FLOAT, 16, MG_FP16}, {DL_FLOAT, 32, MG_FP32}, {DL_FLOAT, 64, MG_FP64},
    {DL_INT, 32, MG_INT32}, {DL_INT, 64, MG_INT64}, {DL_UINT, 8, MG_UINT8}, {DL_FLOAT8_E4M3FN, 8, MG_E4M3}};
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].code == d->dtype.code && known[i].bits == d->dtype.bits && d->dtype.lanes == 1) {
      t->dtype = known[i].dtype;
      return true;
    }
  return false;
}

static bool set_view(mg_tensor *t, const dl_tensor *d, const char *op, const char *name) {
  if (!set_dtype(t, d)) {
    PyErr_Format(PyExc_TypeError, "%s: %s has DLPack type code %d of %d bits and %d lanes, expected bfloat16, float16, "
                 "float32, float64, "
                 "int32, int64, uint8 or float8_e4m3fn", op, name, d->dtype.code, d->dtype.bits, d->dtype.lanes);
    return false;
  }
  const bool cpu = d->device.kind == DL_CPU || d->device.kind == DL_CUDA_HOST;
  const bool gpu = d->device.kind == DL_CUDA || d->device.kind == DL_CUDA_MANAGED;
  if (!cpu && !gpu) {
    PyErr_Format(PyExc_TypeError, "%s: %s is on DLPack device type %d, expected the CPU or a CUDA device",
                 op, name, d->device.kind);
    return false;
  }
  if (d->dims < 0 || d->dims > MG_MAX_DIMS) {
    PyErr_Format(PyExc_ValueError, "%s: %s has %d dimensions, expected at most %d", op, name, d->dims, MG_MAX_DIMS);
    return false;
  }
  if (d->dims && !d->shape) {
    PyErr_Format(PyExc_ValueError, "%s: %s has %d dimensions and no shape (a null pointer)", op, name, d->dims);
    return false;
  }
  t->data = d->data ? (char *)d->data + d->byte_offset : NULL;
  t->device = gpu ? MG_CUDA : MG_CPU;
  t->device_index = gpu ? d->device.index : 0;
  t->dims = d->dims;
  uint64_t compact = 1;             // may wrap where a size is absurd; sizes are checked later
  for (int i = d->dims - 1; i >= 0; i--) {
    t->shape[i] = d->shape[i];
    t->stride[i] = d->strides ? d->strides[i] : (int64_t)compact;
    compact *= (uint64_t)d->shape[i];
  }
  return true;
}

static bool read_capsule(mg_tensor *t, PyObject *capsule, const char *op, const char *name) {
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    const dl_managed_versioned *m = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    if (m->version.major != DL_MAJOR) {
      PyErr_Format(PyExc_BufferError, "%s: %s is exported by DLPack %u.%u, expected %d.x",
                   op, name, m->version.major, m->version.minor,
                   DL_MAJOR);
      return false;
    }
    if (!set_view(t, &m->tensor, op, name)) return false;
    t->read_only = m->flags & DL_READ_ONLY;
    if (!(m->flags & DL_COPIED)) return true;
    PyErr_Format(PyExc_BufferError, "%s: %s exports a copy of its memory, expected a view", op, name);
    return false;
  }
  if (PyCapsule_IsValid(capsule, "dltensor"))
    return set_view(t, &((const dl_managed *)PyCapsule_GetPointer(capsule, "dltensor"))->tensor, op, name);
  PyErr_Format(PyExc_TypeError, "%s: %s: __dlpack__ returned %R, expected an unused DLPack capsule", op, name, capsule);
  return false;
}

// Kind of the object's device by __dlpack_device__, -1 with an exception.
static long device_kind(PyObject *object) {
  PyObject *pair = PyObject_CallMethod(object, "__dlpack_device__", NULL);
  PyObject *first = pair ? PySequence_GetItem(pair, 0) : NULL;
  long kind = first ? PyLong_AsLong(first) : -1;
  Py_XDECREF(pair);
  Py_XDECREF(first);
  return kind;
}

static PyObject *call_export(PyObject *method, PyObject *keywords) {
  PyObject *none = PyTuple_New(0), *capsule = none ? PyObject_Call(method, none, keywords) : NULL;
  Py_XDECREF(none);
  return capsule;
}

// On CUDA the producer orders its work before `stream`; 0 stands for the legacy default stream, which DLPack calls 1.
static PyObject *export(PyObject *object, PyObject *method, mg_stream stream) {
  long kind = device_kind(object);
  if (kind == -1 && PyErr_Occurred()) return NULL;
  PyObject *version = Py_BuildValue("(ii)", DL_MAJOR, DL_MINOR), *keywords = PyDict_New(), *capsule = NULL;
  PyObject *number = PyLong_FromVoidPtr(stream ? stream : (void *)1);
  const bool cuda = kind == DL_CUDA || kind == DL_CUDA_MANAGED;
  if (version && keywords && number && (!cuda || !PyDict_SetItemString(keywords, "stream", number)) &&
      !PyDict_SetItemString(keywords, "max_version", version)) {
    capsule = call_export(method, keywords);
    if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {   // producers before DLPack 1.0 know no versions
      PyErr_Clear();
      if (!PyDict_DelItemString(keywords, "max_version")) capsule = call_export(method, keywords);
    }
  }
  Py_XDECREF(version);
  Py_XDECREF(keywords);
  Py_XDECREF(number);
  return capsule;
}

// A type made by a class statement, whose methods may be Python code.
static bool is_python_class(PyObject *object) { return PyType_GetFlags(Py_TYPE(object)) & Py_TPFLAGS_HEAPTYPE; }

// numpy.ma's arrays export what lies under their mask.
static bool is_masked(PyObject *object) {
  PyObject *mask = is_python_class(object) ? attribute_of_type((PyObject *)Py_TYPE(object), "_defaultmask") : NULL;
  Py_XDECREF(mask);
  return mask;
}

static bool add_export(args *a, int i, PyObject *object, const char *name, mg_stream stream) {
  PyObject *method = attribute_of_type(object, "__dlpack__");
  if (!method || PyType_Check(object) || is_masked(object)) {
    PyErr_Format(PyExc_TypeError, "%s: %s is %R, expected a tensor (an object with __dlpack__)%s", a->op, name,
                 (PyObject *)Py_TYPE(object),
                 method && !PyType_Check(object) ? " without a mask, which would be ignored" : "");
    Py_XDECREF(method);
    return false;
  }
  a->capsule[i] = export(object, method, stream);
  Py_DECREF(method);
  if (!a->capsule[i]) blame(a->op, name);
  return a->capsule[i];
}

static bool add_by_table(args *a, int i, const dl_exchange *table, PyObject *object, const char *name) {
  dl_tensor d;
  if (table->borrow(object, &d)) {
    blame(a->op, name);
    return false;
  }
  if (!set_view(&a->tensor[i], &d, a->op, name)) return false;
  if (!a->stream_table && a->tensor[i].device == MG_CUDA) a->stream_table = table;
  return true;
}

// Exports of types without a table: those of Python classes first, which may run anything, then the built-in ones.
static bool add_exports(args *a, const dl_exchange *const *table, const char *const *names,
                        PyObject *const *objects, mg_stream stream) {
  for (int builtin = 0; builtin < 2; builtin++)
    for (int i = 0; i < a->count; i++)
      if (objects[i] != Py_None && !table[i] && is_python_class(objects[i]) != builtin &&
          !add_export(a, i, objects[i], names[i], stream))
        return false;
  return true;
}

static bool add_views(args *a, const dl_exchange *const *table, const char *const *names, PyObject *const *objects) {
  for (int i = 0; i < a->count; i++) {
    if (objects[i] == Py_None) continue;
    if (!(table[i] ? add_by_table(a, i, table[i], objects[i], names[i])
                   : read_capsule(&a->tensor[i], a->capsule[i], a->op, names[i])))
      return false;
    a->view[i] = &a->tensor[i];
  }
  return true;
}

static void release(args *a) {
  for (int i = 0; i < a->count; i++) Py_XDECREF(a->capsule[i]);   // their destructors free what was never taken over
}

// Read the `count` tensors that `objects` begins with. False with an exception, and then nothing is left to release.
static bool read_tensors(args *a, PyObject *module, const char *op, const char *const *names,
                         PyObject *const *objects, int count,
                         mg_stream stream) {
  a->op = op;
  a->count = count;
  a->stream_table = NULL;
  for (int i = 0; i < count; i++) {
    a->view[i] = NULL;
    a->capsule[i] = NULL;
    a->tensor[i].read_only = false;
  }
  state *s = PyModule_GetState(module);
  const dl_exchange *table[MAX_TENSORS];
  bool all = true;
  for (int i = 0; i < count; i++) {
    table[i] = objects[i] == Py_None ? NULL : table_of(s, objects[i]);
    all &= table[i] || objects[i] == Py_None;
  }
  if ((all || add_exports(a, table, names, objects, stream)) && add_views(a, table, names, objects)) return true;
  release(a);
  return false;
}

// The producer's current stream of the first CUDA tensor, where the caller named none.
static bool ask_stream(const args *a, mg_stream *stream) {
  if (*stream || !a->stream_table || !a->stream_table->current_stream) return true;
  for (int i = 0; i < a->count; i++)
    if (a->view[i] && a->view[i]->device == MG_CUDA)
      return !a->stream_table->current_stream(DL_CUDA, a->view[i]->device_index, stream);
  return true;
}

// ---- arguments

static bool check_count(const char *op, Py_ssize_t found, int least, int most) {
  if (found >= least && found <= most) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %d%s%d positional arguments, got %zd",
               op, least, least == most ? " = " : " to ", most, found);
  return false;
}

static bool read_stream(PyObject *object, mg_stream *stream) {
  *stream = PyLong_AsVoidPtr(object);
  return !PyErr_Occurred();
}

// A number that float32 can tell from 0 and from infinity, where it is neither.
static bool to_float(const char *op, const char *name, double found, float *value) {
  const bool large = found > FLT_MAX || found < -FLT_MAX;
  *value = large ? (found > 0 ? INFINITY : -INFINITY) : (float)found;
  if (!(large && found - found == 0) && (*value != 0 || found == 0)) return true;
  PyObject *number = PyFloat_FromDouble(found);
  if (number) PyErr_Format(PyExc_ValueError, "%s: %s is %R, expected a number that float32 can hold", op, name, number);
  Py_XDECREF(number);
  return false;
}

static bool read_float(const char *op, const char *name, PyObject *object, float *value) {
  const double found = PyFloat_AsDouble(object);
  return !(found == -1 && PyErr_Occurred()) && to_float(op, name, found, value);
}

static bool read_bool(PyObject *object, bool *value) {
  int truth = PyObject_IsTrue(object);
  *value = truth > 0;
  return truth >= 0;
}

static bool read_int(PyObject *object, int *value) {
  long found = PyLong_AsLong(object);
  if (found == -1 && PyErr_Occurred()) return false;
  if (found < INT32_MIN || found > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "%ld is out of range, expected 32 bits", found);
    return false;
  }
  *value = (int)found;
  return true;
}

// ---- ops by their rows in ops.def

typedef union any_args {
#define OP(op, ...) mg_##op##_args op;
#include "ops.def"
} any_args;

static bool read_integer(const mg_field *f, PyObject *object, void *to) {
  if (f->kind == KIND_int) return read_int(object, to);
  if (f->kind == KIND_int64_t) *(int64_t *)to = PyLong_AsLongLong(object);
  else *(uint64_t *)to = PyLong_AsUnsignedLongLongMask(object);
  return !PyErr_Occurred();
}

static bool set_number(const char *op, const mg_field *f, PyObject *object, void *to) {
  static const char *const kinds[] = {[KIND_float] = "a number", [KIND_int] = "an integer of 32 bits",
                                      [KIND_bool] = "True or False",
                                      [KIND_int64_t] = "an integer of 64 bits", [KIND_uint64_t] = "an integer"};
  if (f->kind == KIND_float ? read_float(op, f->name, object, to) :
      f->kind == KIND_bool ? read_bool(object, to) : read_integer(f, object, to)) return true;
  if (f->kind == KIND_float && PyErr_ExceptionMatches(PyExc_ValueError)) return false;   // says which, and why
  PyErr_Clear();
  PyErr_Format(PyExc_TypeError, "%s: %s is %R, expected %s", op, f->name, object, kinds[f->kind]);
  return false;
}

// The arguments of one call of a row: of the op itself, or of its workspace's size, for which only those that are read
// are taken.
typedef struct row_call {
  const mg_row *row;
  const char *op;                   // in messages
  bool only_space;
  any_args values;
  mg_stream stream;
  const mg_field *field[MAX_TENSORS];
  const char *names[MAX_TENSORS];
  PyObject *tensors[MAX_TENSORS];   // those that are given
  int count;
} row_call;

static bool takes(const row_call *c, const mg_field *f) { return !c->only_space || !mg_is_tensor(f) || mg_is_read(f); }

static bool set_argument(row_call *c, const mg_field *f, PyObject *object) {
  if (!mg_is_tensor(f)) return set_number(c->op, f, object, (char *)&c->values + f->offset);
  if (object == Py_None) return true;   // what must not be absent is found by mg_check
  c->field[c->count] = f;
  c->names[c->count] = mg_shown(c->row, f);
  c->tensors[c->count++] = object;
  return true;
}

// By position, in the row's order, the stream behind them; those by name follow, as in every vectorcall.
static bool set_arguments(row_call *c, PyObject *const *objects, Py_ssize_t count, PyObject *names) {
  const mg_field *const field = c->row->field, *const end = field + c->row->arguments, *f = field;
  const Py_ssize_t named = names ? PyTuple_Size(names) : 0;
  bool has_stream = false;
  uint64_t set = 0;                 // which arguments are
  _Static_assert(MG_MAX_ARGS <= 64, "a bit for each argument");
  int most = c->row->arguments + 1;
  if (c->only_space)
    for (f = field, most = 0; f < end; f++) most += takes(c, f);
  if (count > most)
    return PyErr_Format(PyExc_TypeError, "%s%s takes at most %d arguments, got %zd", c->row->name,
                        c->only_space ? "_workspace" : "", most, count), false;
  memcpy(&c->values, c->row->defaults, c->row->bytes);
  f = field;
  for (Py_ssize_t i = 0; i < count; i++, f++) {
    while (f < end && !takes(c, f)) f++;
    if (f == end) has_stream = true;
    else set |= (uint64_t)1 << (f - field);
    if (f == end ? !read_stream(objects[i], &c->stream) : !set_argument(c, f, objects[i])) return false;
  }
  for (Py_ssize_t k = 0; k < named; k++) {
    PyObject *name = PyTuple_GetItem(names, k), *object = objects[count + k];
    for (f = field; f < end && (!takes(c, f) || PyUnicode_CompareWithASCIIString(name, f->name)); f++) {}
    if (f == end && (c->only_space || PyUnicode_CompareWithASCIIString(name, "stream")))
      return PyErr_Format(PyExc_TypeError, "%s has no argument %U", c->row->name, name), false;
    if (f == end ? has_stream : set >> (f - field) & 1)
      return PyErr_Format(PyExc_TypeError, "%s: %U is given twice", c->row->name, name), false;
    if (f == end ? !read_stream(object, &c->stream) : !set_argument(c, f, object)) return false;
  }
  return true;
}

// The views of the tensors that are given; `a` is then to be released.
static bool view_arguments(row_call *c, args *a, PyObject *module) {
  if (!read_tensors(a, module, c->op, c->names, c->tensors, c->count, c->stream)) return false;
  if (!ask_stream(a, &c->stream)) return release(a), false;
  for (int i = 0; i < c->count; i++)
    *(const mg_tensor **)(void *)((char *)&c->values + c->field[i]->offset) = a->view[i];
  *(mg_stream *)(void *)((char *)&c->values + c->row->stream) = c->stream;
  return true;
}

typedef mg_status runner(const void *args);
static PyObject *call_row(PyObject *module, mg_op op, runner *run, PyObject *const *objects,
                          Py_ssize_t count, PyObject *names) {
  row_call c;
  args a;
  mg_status status;
  c.row = mg_row_of(op), c.op = mg_op_name(op), c.only_space = false, c.stream = NULL, c.count = 0;
  if (!set_arguments(&c, objects, count, names) || !view_arguments(&c, &a, module)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = run(&c.values);
  Py_END_ALLOW_THREADS
  release(&a);
  return none_or_raise(status);
}

typedef mg_status sizer(size_t *bytes, const void *args);
static PyObject *call_workspace(PyObject *module, mg_op op, sizer *run, PyObject *const *objects,
                                Py_ssize_t count, PyObject *names) {
  row_call c;
  args a;
  size_t bytes = 0;
  c.row = mg_row_of(op), c.op = mg_op_name(op), c.only_space = true, c.stream = NULL, c.count = 0;
  if (!set_arguments(&c, objects, count, names) || !view_arguments(&c, &a, module)) return NULL;
  const mg_status status = run(&bytes, &c.values);
  release(&a);
  return status ? raise_status(status) : PyLong_FromSize_t(bytes);
}

#define OP(op, ...) \
  static mg_status run_##op(const void *args) { return mg_##op(args); } \
  static PyObject *py_##op(PyObject *module, PyObject *const *objects, Py_ssize_t count, PyObject *names) { \
    return call_row(module, MG_OP_##op, run_##op, objects, count, names); \
  }
#include "ops.def"
#define SPACE(op) \
  static mg_status size_##op(size_t *bytes, const void *args) { return mg_##op##_workspace(bytes, args); } \
  static PyObject *py_##op##_workspace(PyObject *module, PyObject *const *objects, \
                                       Py_ssize_t count, PyObject *names) { \
    return call_workspace(module, MG_OP_##op, size_##op, objects, count, names); \
  }
#define OP(op, ...) __VA_ARGS__
#include "ops.def"

// ---- what there is, and what would be used

// A dict that takes over its values; NULL with an exception if one of them could not be made.
static bool put(PyObject *dict, const char *key, PyObject *value) {
  int failed = !value || PyDict_SetItemString(dict, key, value);
  Py_XDECREF(value);
  return !failed;
}

static PyObject *text(const char *chars) { return chars ? PyUnicode_FromString(chars) : Py_NewRef(Py_None); }

static bool parse_dtype(const char *name, mg_dtype *dtype) {
  for (int t = 0; t < MG_DTYPE_COUNT; t++)
    if (!strcmp(name, mg_dtype_name((mg_dtype)t))) {
      *dtype = (mg_dtype)t;
      return true;
    }
  PyErr_Format(PyExc_ValueError, "explain: dtype is %s, expected bfloat16, float16, float32 or float8_e4m3fn", name);
  return false;
}

// (name of the row that takes the problem or None, text). behind: of the text.
static PyObject *explain_problem(mg_op op, const mg_problem *p, const mg_context *c, const char *behind) {
  char chars[8192];
  const mg_kernel *row;
  size_t length = mg_explain(&row, op, p, c, chars, sizeof chars);
  if (op == MG_OP_attention_decode && length < sizeof chars)
    mg_explain_splits(p, c, chars + length, sizeof chars - length);
  return Py_BuildValue("zN", row ? row->name : NULL, PyUnicode_FromFormat("%s%s", chars, behind));
}

static PyObject *dry_run(PyObject *module, PyObject *call) {
  (void)module;
  mg_dry_run run = {0};
  mg_run_dry(&run);
  PyObject *result = PyObject_CallObject(call, NULL);
  mg_run_dry(NULL);
  Py_XDECREF(result);
  if (result && !run.asked)
    return PyErr_Format(PyExc_RuntimeError,
      "dry_run: the call asked for no kernel: its tensors have no memory, or something other than Margay computes it");
  if (!result && !(run.asked && PyErr_ExceptionMatches(PyExc_NotImplementedError))) return NULL;
  PyErr_Clear();
  return explain_problem(run.op, &run.problem, &run.context, "");
}

static PyObject *runs_dry(PyObject *module, PyObject *const *objects, Py_ssize_t count) {
  (void)module, (void)objects;
  return check_count("runs_dry", count, 0, 0) ? PyBool_FromLong(mg_runs_dry()) : NULL;
}

static bool check_size(const char *name, long long found) {
  if (found >= 0 && found <= INT32_MAX) return true;
  PyErr_Format(PyExc_ValueError, "explain: %s is %lld, expected 0 to 2^31 - 1", name, found);
  return false;
}

static PyObject *explain(PyObject *module, PyObject *positional, PyObject *keywords) {
  static char *names[] = {"op", "dtype", "gpu", "causal", "deterministic", "trans_a",
                          "trans_b", "d", "batch", "heads_q", "heads_k", "nq",
                          "nk", "m", "n", "k", "sms", "features", "span", "splits", "page", "dv", NULL};
  (void)module;
  const char *name, *dtype = "bfloat16";
  int gpu = 0, causal = 0, deterministic = 0, trans_a = 0, trans_b = 0, splits = 0;
  long long v[9] = {0}, span = -1, page = 0, dv = -1;   // where they are not given, span: all of nk, dv: d
  mg_op op;
  mg_problem p = {0};
  if (!PyArg_ParseTupleAndKeywords(positional, keywords, "s|$spppppLLLLLLLLLiiLiLL:explain",
                                   names, &name, &dtype, &gpu, &causal, &deterministic,
                                   &trans_a, &trans_b, &v[0], &v[1], &v[2],
                                   &v[3], &v[4], &v[5], &v[6], &v[7], &v[8], &p.sms, &p.features, &span,
                                   &splits, &page, &dv) ||
      !parse_dtype(dtype, &p.dtype))
    return NULL;
  mg_status status = mg_op_find(&op, name);
  if (status) return raise_status(status);
  for (int i = 0; i < 9; i++)
    if (!check_size(names[7 + i], v[i])) return NULL;
  if (!check_size("sms", p.sms) || !check_size("features", p.features) || !check_size("page", page)) return NULL;
  p = (mg_problem){.dtype = p.dtype, .gpu = gpu, .causal = causal, .deterministic = deterministic,
                   .trans_a = trans_a, .trans_b = trans_b,
                   .d = v[0], .dv = dv < 0 ? v[0] : dv, .batch = v[1], .heads_q = v[2],
                   .heads_k = v[3], .nq = v[4], .nk = v[5],
                   .size = {.M = v[6], .N = v[7], .K = v[8], .B = v[1], .R = v[1], .H = v[2], .HV = v[2], .G = v[3],
                            .T = v[4], .P = v[0], .V = dv < 0 ? v[0] : dv},
                   .span = span < 0 || span > v[5] ? v[5] : span, .page = page, .features = p.features, .sms = p.sms};
  if (splits < 0 || splits > 128)
    return PyErr_Format(PyExc_ValueError, "explain: splits is %d, expected 0 (chosen) to 128", splits);
  mg_context c;
  const mg_tensor there = {.device = gpu ? MG_CUDA : MG_CPU};
  const bool known = !mg_context_open(&c, &there, NULL);
  if (!known && !gpu) return raise_status(MG_VALUE);
  if (!p.sms) p.sms = known ? c.sms : 132;
  p.splits = splits;
  char behind[1024] = "";
  if (!known) snprintf(behind, sizeof behind, "\n  (for an H100, because here: %s)", mg_last_error());
  return explain_problem(op, &p, known ? &c : NULL, behind);
}

static PyObject *kernel_dict(const mg_kernel *row) {
  static const char *const places[] = {"any", "cpu", "gpu"};
  const mg_kernel_desc *d = mg_desc(row);
  PyObject *dict = PyDict_New();
  if (dict && put(dict, "name", text(row->name)) && put(dict, "op", text(mg_op_row(row->op))) &&
      put(dict, "owner", text(mg_row_of(row->op)->owner)) && put(dict, "source", text(row->source)) &&
      put(dict, "dtype", text(mg_dtype_name(row->dtype))) && put(dict, "where", text(places[row->where])) &&
      put(dict, "when", text(row->when_text)) && put(dict, "constants", text(row->constants)) &&
      put(dict, "has_gpu_image", PyBool_FromLong(row->image != NULL)) &&
      put(dict, "shared_bytes", PyLong_FromLong((long)d->shared_bytes)) &&
      put(dict, "threads", PyLong_FromLong((long)d->threads)) &&
      put(dict, "params_bytes", PyLong_FromLong((long)d->params_bytes)))
    return dict;
  Py_XDECREF(dict);
  return NULL;
}

static PyObject *kernels(PyObject *module, PyObject *const *objects, Py_ssize_t count) {
  (void)module, (void)objects;
  if (!check_count("kernels", count, 0, 0)) return NULL;
  PyObject *list = PyList_New(0);
  for (int i = 0; list && i < mg_kernel_count; i++) {
    PyObject *row = kernel_dict(&mg_kernels[i]);
    if (!row || PyList_Append(list, row)) Py_CLEAR(list);
    Py_XDECREF(row);
  }
  return list;
}

static PyObject *field_dict(const mg_field *f) {
  static const char *const roles[] = {"end", "out", "optout", "save", "work", "optwork",
                                      "space", "inout", "inoutmat", "optinoutmat", "in", "opt", "mat", "num", "let",
                                      "needs", "takes", "draw", "shown", "anywhere"};
  static const char *const kinds[] = {"half", "real", "real", "float32", "int32", "uint8",
                                      "bfloat16", "float8_e4m3fn", "float", "int", "bool", "int64", "uint64"};
  const int n = f->role == ROLE_LET ? 1 : f->dims;
  PyObject *sizes = PyTuple_New(n);
  for (int i = 0; sizes && i < n; i++) PyTuple_SetItem(sizes, i, text(mg_size_names[f->size[i]]));
  return Py_BuildValue("{s:s, s:z, s:s, s:s, s:N, s:d, s:d}", "name", f->name,
                       "text", f->text, "role", roles[f->role], "kind", kinds[f->kind], "sizes", sizes,
                       "low", f->low, "high", f->high);
}

static PyObject *ops(PyObject *module, PyObject *const *objects, Py_ssize_t count) {
  (void)module, (void)objects;
  if (!check_count("ops", count, 0, 0)) return NULL;
  PyObject *all = PyDict_New();
  for (int i = 0; all && i < MG_OP_COUNT; i++) {
    const mg_row *row = mg_row_of((mg_op)i);
    if (!row->arguments) continue;
    PyObject *list = Py_BuildValue("[{s:s, s:s, s:()}]", "name", *row->called, "role", "called", "sizes");
    for (const mg_field *f = row->field; list && f->role; f++) {
      PyObject *dict = field_dict(f);
      if (!dict || PyList_Append(list, dict)) Py_CLEAR(list);
      Py_XDECREF(dict);
    }
    if (!put(all, row->name, list)) Py_CLEAR(all);
  }
  return all;
}

static PyObject *device_dict(const mg_gpu *gpu) {
  return Py_BuildValue("{s:s, s:N, s:i}", "name", gpu->name, "cc",
                       PyUnicode_FromFormat("%d.%d", gpu->major, gpu->minor), "sms", gpu->sms);
}

// The devices that can be opened; `reason` is set to why there is none that the kernels run on.
static PyObject *device_list(PyObject **reason) {
  int devices = 0;
  bool usable = false;
  PyObject *list = PyList_New(0);
  mg_status status = mg_gpu_count(&devices);
  for (int i = 0; list && !status && i < devices; i++) {
    mg_gpu *gpu;
    if ((status = mg_gpu_open(&gpu, i))) break;
    usable |= gpu->major == 9 && gpu->minor == 0;
    PyObject *dict = device_dict(gpu);
    if (!dict || PyList_Append(list, dict)) Py_CLEAR(list);
    Py_XDECREF(dict);
  }
  *reason = status ? text(mg_last_error()) : !devices ? text("the driver sees no GPU")
      : !usable ? text("no GPU of compute capability 9.0")
            : !mg_has_images ? text("built without GPU kernels: nvcc was not found, or MARGAY_CUDA=0") : text(NULL);
  return list;
}

static PyObject *info(PyObject *module, PyObject *const *objects, Py_ssize_t count) {
  (void)module, (void)objects;
  if (!check_count("info", count, 0, 0)) return NULL;
  PyObject *reason, *devices = device_list(&reason), *dict = PyDict_New();
  const int version = mg_driver_version();
  const char *isa = mg_isa_name(mg_host_isa());
  const bool listed = dict && put(dict, "devices", devices) && put(dict, "gpu_reason", reason);
  if (listed && put(dict, "cuda_built", PyBool_FromLong(mg_has_images)) &&
      put(dict, "kernels", PyLong_FromLong(mg_kernel_count)) &&
      put(dict, "isa", mg_check_isa() ? PyUnicode_FromFormat("%s (%s)", isa, mg_last_error()) : text(isa)) &&
      put(dict, "threads", PyLong_FromLong(mg_num_threads())) &&
      put(dict, "driver", version ? PyUnicode_FromFormat("%d.%d", version / 1000, version % 1000 / 10) : text(NULL)))
    return dict;
  Py_XDECREF(dict);
  return NULL;
}

static PyObject *preload(PyObject *module, PyObject *const *objects, Py_ssize_t count) {
  (void)module;
  int device;
  if (!check_count("preload", count, 2, 2) || !read_int(objects[1], &device)) return NULL;
  const char *op = objects[0] == Py_None ? NULL : PyUnicode_AsUTF8AndSize(objects[0], NULL);
  if (!op && PyErr_Occurred()) return NULL;
  mg_status status;
  Py_BEGIN_ALLOW_THREADS
  status = mg_preload(op, device);
  Py_END_ALLOW_THREADS
  return none_or_raise(status);
}

static PyObject *prefer(PyObject *module, PyObject *const *objects, Py_ssize_t count) {
  (void)module;
  if (!check_count("prefer", count, 1, 1)) return NULL;
  const char *name = objects[0] == Py_None ? NULL : PyUnicode_AsUTF8AndSize(objects[0], NULL);
  return !name && PyErr_Occurred() ? NULL : none_or_raise(mg_prefer(name));
}

static PyObject *intercept(PyObject *module, PyObject *const *objects, Py_ssize_t count) {
  (void)module;
  int sms;
  if (!check_count("intercept", count, 2, 2) || !read_int(objects[1], &sms)) return NULL;
  void *take = PyLong_AsVoidPtr(objects[0]);
  if (PyErr_Occurred()) return NULL;
  mg_intercept((mg_launch_taker)(uintptr_t)take, sms);
  return Py_NewRef(Py_None);
}

static PyObject *set_num_threads(PyObject *module, PyObject *const *objects, Py_ssize_t count) {
  (void)module;
  int n;
  if (!check_count("set_num_threads", count, 1, 1) || !read_int(objects[0], &n)) return NULL;
  if (n < 0) return PyErr_Format(PyExc_ValueError, "set_num_threads: n is %d, expected at least 0", n);
  mg_set_num_threads(n);
  return Py_NewRef(Py_None);
}

static PyObject *num_threads(PyObject *module, PyObject *const *objects, Py_ssize_t count) {
  (void)module, (void)objects;
  return check_count("num_threads", count, 0, 0) ? PyLong_FromLong(mg_num_threads()) : NULL;
}

// ---- the module

// The arguments of <op>_workspace: what is read, and numbers.
#define DOC_OUT(name)
#define DOC_OPTOUT(name)
#define DOC_SAVE(name)
#define DOC_WORK(name)
#define DOC_OPTWORK(name)
#define DOC_SPACE(name)
#define DOC_INOUT(name) name ", "
#define DOC_INOUTMAT(name) name ", "
#define DOC_OPTINOUTMAT(name) name ", "
#define DOC_IN(name) name ", "
#define DOC_OPT(name) name ", "
#define DOC_MAT(name) name ", "
#define TENSOR(name, role, ...) DOC_##role(#name)
#define NUM(type, name, value) #name "=" #value ", "
#define OP(op, ...) __attribute__((unused)) static const char op##_reads[] = #op "_workspace(" __VA_ARGS__ ") -> bytes";
#include "ops.def"

#define FUNCTION(f) (PyCFunction)(void (*)(void))f   // through the one function pointer type that compilers let pass
                                                     // for any
static PyMethodDef methods[] = {
#define TENSOR(name, ...) #name ", "
#define NUM(type, name, value) #name "=" #value ", "
#define OP(op, ...) {#op, FUNCTION(py_##op), METH_FASTCALL | METH_KEYWORDS, #op "(" __VA_ARGS__ "stream=0)"},
#include "ops.def"
#define SPACE(op) {#op "_workspace", FUNCTION(py_##op##_workspace), METH_FASTCALL | METH_KEYWORDS, op##_reads},
#define OP(op, ...) __VA_ARGS__
#include "ops.def"
  {"ops", FUNCTION(ops), METH_FASTCALL, "ops() -> rows of ops.def: {op: [{name, text, role, kind, sizes, low, high}]}"},
  {"explain", FUNCTION(explain), METH_VARARGS | METH_KEYWORDS,
   "explain(op, *, dtype, gpu, ...) -> (row or None, why and why not the others)"},
  {"dry_run", FUNCTION(dry_run), METH_O,
   "dry_run(call) -> what explain says of the first kernel that a function without arguments would launch; "
   "nothing is launched"},
  {"runs_dry", FUNCTION(runs_dry), METH_FASTCALL,
   "runs_dry() -> whether this thread is in a dry run, where what a kernel does not compute is not computed either"},
  {"kernels", FUNCTION(kernels), METH_FASTCALL, "kernels() -> rows of kernels.def"},
  {"info", FUNCTION(info), METH_FASTCALL, "info() -> build, CPU, driver and devices"},
  {"preload", FUNCTION(preload), METH_FASTCALL, "preload(op or None, device)"},
  {"intercept", FUNCTION(intercept), METH_FASTCALL,
   "intercept(address, sms): this thread's launches go to a C function bool (row, params, blocks); 0 ends that. See "
   "margay.check"},
  {"prefer", FUNCTION(prefer), METH_FASTCALL,
   "prefer(row or None): this thread's calls use that kernel wherever its condition holds"},
  {"set_num_threads", FUNCTION(set_num_threads), METH_FASTCALL, "set_num_threads(n); 0: the default"},
  {"num_threads", FUNCTION(num_threads), METH_FASTCALL, "num_threads() -> threads of the CPU backend"},
  {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
  state *s = PyModule_GetState(module);
  atomic_init(&s->types, 0);
  atomic_flag_clear(&s->adding);
  return 0;
}

static PyModuleDef_Slot slots[] = {
  {Py_mod_exec, __extension__(void *) execute},
#if !defined(Py_LIMITED_API) && PY_VERSION_HEX >= 0x030D0000
  {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
  {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
  {0, NULL},
};

static int traverse(PyObject *module, visitproc visit, void *arg) {
  state *s = PyModule_GetState(module);
  for (int i = 0; s && i < atomic_load(&s->types); i++) Py_VISIT(s->type[i].type);
  return 0;
}

static int clear(PyObject *module) {
  state *s = PyModule_GetState(module);
  int known = s ? atomic_exchange(&s->types, 0) : 0;
  for (int i = 0; i < known; i++) Py_CLEAR(s->type[i].type);
  return 0;
}

static void free_state(void *module) { clear(module); }

static PyModuleDef definition = {
  .m_base = PyModuleDef_HEAD_INIT, .m_name = "margay._C",
  .m_doc = "Margay's kernels on tensors that speak DLPack; outputs come first.",
  .m_size = sizeof(state), .m_methods = methods, .m_slots = slots, .m_traverse = traverse,
  .m_clear = clear, .m_free = free_state,
};

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
