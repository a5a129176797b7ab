"""Python functions of an op, made from its row in csrc/ops.def.

`function(name)` takes the op's inputs and numbers in the order of the row and returns its results. NumPy arrays give
NumPy arrays. PyTorch tensors: plain ones in eager mode go straight to `_C`; whatever wants to see the call (compile,
export, modes, subclasses, transforms, the meta device) gets the operator torch.ops.margay.<name>. A row `<name>_bwd`
makes the op differentiable: it reads d<result>, and inputs, results and saved tensors by their names, and writes
d<input>.

The functions are made as text and compiled once: loops over a row's arguments in every call would cost microseconds.
"""

import ast
import functools
import re
import sys
import threading
import types

from margay import _C, _shared

ROWS = _C.ops()
_HALF = "bfloat16, float16 or, on the CPU, float32"
_ANYWHERE = "bfloat16, float16 or float32"
_KINDS = {"float": float, "int": int, "bool": bool, "int64": int, "uint64": int}
_SIZE = r"\b[A-Z]\w*\b"
_LARGEST = 2.0**128 - 2.0**104         # float32's; LARGEST of rows
_ROLES = {"inoutmat": "inout", "optinoutmat": "opt"}     # without what concerns memory only
_made: dict = {}        # (op, type of the first argument) -> function
_gradients = _shared.gradients         # op -> a gradient written by hand
_rules: dict = {}       # op -> a rule of vmap written by hand
_direct: dict = {}      # op -> what computes it on plain PyTorch tensors
_same: dict = {}        # op -> two inputs and a function of what its backward knows: whether they have one gradient


class Row:
    """A row of ops.def. Its entries are dicts: name, text, role, kind, sizes, low, high."""

    def __init__(self, name):
        entries = [f | {"role": _ROLES.get(f["role"], f["role"])} for f in ROWS[name]]
        role = lambda *roles: [f for f in entries if f["role"] in roles]  # noqa: E731
        self.name, self.called = name, role("called")[0]["name"]       # the latter in messages
        self.arguments = role("out", "optout", "save", "work", "optwork", "space", "inout", "in", "opt", "mat", "num")
        self.results, self.saves, self.work = role("out", "optout"), role("save"), role("work", "optwork", "space")
        self.inputs, self.numbers = role("inout", "in", "opt", "mat"), role("num")
        self.optional = role("optout")                             # what a call may leave out, in the order of `want`
        self.absent = [f["name"] for f in role("opt")]             # what may be None
        self.derived = role("let", "needs", "takes")               # in the row's order
        self.sizes = dict.fromkeys(size for f in entries for size in f["sizes"])
        self.anywhere = bool(role("anywhere"))                     # float32 on the GPU too
        self.shown = {f["name"]: f["name"] for f in entries} | {f["name"]: f["text"] for f in role("shown")}
        self.draw = {f["name"]: (f["low"], f["high"]) for f in role("draw")}
        self.first = self.inputs[0]["name"]
        self.halves = [f["name"] for f in self.inputs if f["kind"] == "half"]

    @property
    def may_miss(self):
        """`absent` in the words of messages."""
        return [self.shown[name] for name in self.absent]

    def as_shown(self, tensors):
        return {self.shown[name]: t for name, t in tensors.items()}

    @property
    def lets(self):
        """(size, expression of C, the same as a code object) of each LET."""
        return [(f["sizes"][0], f["name"], condition(f["name"])) for f in self.derived if f["role"] == "let"]

    def derive(self, known):
        """Adds LETs to `known`: sizes (-1: no tensor that is given has it), numbers, and of each tensor that is read
        whether it is given. Returns the first entry that does not hold, or None."""
        for f in self.derived:
            value = eval(condition(f["name"]), {"LARGEST": _LARGEST}, known)
            if f["role"] == "let":
                known[f["sizes"][0]] = value
            elif not value:
                return f
        return None

    def problem(self, r, low, high, whole=()):
        """Random sizes that NEEDS and TAKES hold for, and which tensors are given, as `derive` takes them; numbers have
        their defaults. r: a random.Random. low, high: of sizes without DRAW. whole: sizes that are multiples of 8."""
        lets = {f["sizes"][0] for f in self.derived if f["role"] == "let"}
        for _ in range(10000):
            given = {f["name"]: f["role"] != "opt" or r.random() < 0.5 for f in self.inputs}
            known = dict.fromkeys(self.sizes, -1)
            for size in sorted({size for f in self.inputs if given[f["name"]] for size in f["sizes"]} - lets):
                n = r.randint(*map(int, self.draw.get(size, (low, high))))
                known[size] = -(-n // 8) * 8 if size in whole else n
            known |= given | {f["name"]: default(f) for f in self.numbers}
            if not self.derive(known):
                return known
        raise RuntimeError(f"{self.name}: no sizes were found for which NEEDS and TAKES hold")

    # ---- pieces of generated text

    def size(self, name):
        """Where a size is read: from the first input that has it, best one that is always there. LET: the variable
        of `sizes_of`."""
        for f in self.inputs:
            if f["role"] != "opt" and name in f["sizes"]:
                return f"{f['name']}.shape[{f['sizes'].index(name)}]"
        if any(f["role"] == "let" and name in f["sizes"] for f in self.derived):
            return name
        for f in self.inputs:
            if name in f["sizes"]:
                return f"(-1 if {f['name']} is None else {f['name']}.shape[{f['sizes'].index(name)}])"
        raise TypeError(f"{self.name}: no input has the size {name}")

    def sizes_of(self, fields):
        """A line for each LET that the fields' sizes follow from, in the row's order."""
        wanted, lines = {self.size(size) for f in fields for size in f["sizes"]}, []
        for f in reversed(self.derived):
            if f["role"] == "let" and f["sizes"][0] in wanted:
                expression = _text(f["name"])
                wanted |= {self.size(size) for size in re.findall(_SIZE, expression)}
                lines.insert(0, f"{f['sizes'][0]} = " + re.sub(_SIZE, lambda m: self.size(m[0]), expression))
        return lines

    def shape(self, f):
        return "(" + "".join(self.size(name) + ", " for name in f["sizes"]) + ")"

    def twin(self, f):
        """An input of the same sizes and dtype: the result lies in memory as it does."""
        alike = (r["name"] for r in self.inputs if r["role"] == "in" and r["kind"] == f["kind"] == "half"
                 and r["sizes"] == f["sizes"])
        return next(alike, None) if f["role"] in ("out", "optout") else None

    def new(self, f, place=""):
        dtype = (f"{self.halves[0]}.dtype" if f["kind"] == "half" else self.real(f) if f["kind"] == "real" else
                 f"dtypes[{f['kind']!r}]")
        twin = self.twin(f)
        return f"empty_like({twin})" if twin else f"empty({self.shape(f)}, dtype={dtype}{place})"

    def real(self, f):
        """The dtype of a result: new_<input> has that input's, or where that is not given that of the first half; a
        gradient its input's, or what the forward made new of it, or where that is not given the first one's, or
        the half's."""
        reals = {r["name"]: r for r in self.inputs if r["kind"] == "real"}
        if f["name"].startswith("new_"):
            name = f["name"].removeprefix("new_")
            return f"({self.halves[0]} if {name} is None else {name}).dtype"
        of, first = reals.get(f["name"][1:]) or reals["new_" + f["name"][1:]], next(iter(reals))
        other = first if reals[first]["role"] != "opt" else self.halves[0]
        return (f"{of['name']}.dtype" if of["role"] != "opt"
                else f"({other} if {of['name']} is None else {of['name']}).dtype")

    def signature(self, tensor="", optional="", numbers=False):
        """Inputs and numbers, with defaults once all that follow have one."""
        words, late = [], True
        for f in reversed([*self.inputs, *self.numbers]):
            late = late and f["role"] in ("opt", "num")
            kind = {"num": f["kind"] if numbers else "", "opt": optional}.get(f["role"], tensor)
            words.append(f"{kind} {f['name']}".strip() + (f"={default(f)!r}" if late else ""))
        return ", ".join(reversed(words))

    def schema(self):
        written = ["Tensor"] * len(self.results + self.saves)
        made = written[0] if len(written) == 1 else f"({', '.join(written)})"
        return f"{self.name}({self.signature('Tensor', 'Tensor?', True)}) -> {made}"

    def stub(self):
        """The line of _C.pyi."""
        stubs = [f"def {self.name}({_stubs(self.arguments)}, stream: int = 0) -> None: ..."]
        if any(f["role"] == "space" for f in self.arguments):
            read = [f for f in self.arguments if f in self.inputs or f in self.numbers]
            stubs.append(f"def {self.name}_workspace({_stubs(read, '_Tensor | None')}) -> int: ...")
        return "\n".join(stubs)


MAY_MISS = ("opt", "optout", "optwork", "space")


def _stubs(fields, tensor="_Tensor"):
    """With defaults once all that follow have one."""
    words, late = [], True
    for f in reversed(fields):
        number = f["role"] == "num"
        late = late and (number or f["role"] in MAY_MISS)
        kind = tensor if not number else "int" if f["kind"] in ("int64", "uint64") else f["kind"]
        kind = "_Tensor | None" if f["role"] in MAY_MISS else kind
        words.append(f"{f['name']}: {kind}" + (f" = {_literal(default(f))}" if late else ""))
    return ", ".join(reversed(words))


def _literal(value):
    return f"{value:g}" if isinstance(value, float) else repr(value)


def names(fields):
    return ", ".join(f["name"] for f in fields)


def default(f):
    return _KINDS[f["kind"]](f["low"]) if f["role"] == "num" else None


@functools.cache
def _text(expression):
    """A condition of C in Python: only what means the same in both, or has a plain translation."""
    if "?" in expression:
        if_so, *others = re.split("[?:]", expression)
        if len(others) != 2 or "(" in expression:
            raise SyntaxError(f"{expression}: only a conditional expression without brackets has a translation")
        return f"{_text(others[0])} if {_text(if_so)} else {_text(others[1])}"
    text = expression.replace("&&", " and ").replace("||", " or ").replace("/", "//")
    return ast.unparse(_Numbers().visit(ast.parse(re.sub(r"!(?!=)", " not ", text).strip(), mode="eval")))


class _Numbers(ast.NodeTransformer):
    """Truth that is counted with becomes 0 or 1: sizes may be symbols, which do not multiply with it in every release
    of PyTorch."""

    def visit_BinOp(self, node):
        self.generic_visit(node)
        node.left, node.right = self.counted(node.left), self.counted(node.right)
        return node

    @staticmethod
    def counted(x):
        if isinstance(x, (ast.Compare, ast.BoolOp)) or isinstance(x, ast.UnaryOp) and isinstance(x.op, ast.Not):
            return ast.Call(ast.Name("int"), [x], [])
        if isinstance(x, ast.Name) and x.id.islower():                  # of a row's numbers, some are bool
            return ast.UnaryOp(ast.UAdd(), x)
        return x


@functools.cache
def condition(expression):
    return compile(_text(expression), expression, "eval")


def compiled(name, text, **known):
    exec(compile(text, f"<margay {name}>", "exec"), known)
    return known


def check(row, tensors, numbers, dtype_name, halves):
    """What C checks of dtypes and sizes, in its words, of tensors by name that may have no memory."""
    for f in row.inputs:
        if tensors[f["name"]] is None and f["role"] != "opt":
            raise TypeError(f"{row.called}: {row.shown[f['name']]} is missing, expected a tensor")
    given = [f for f in row.inputs if tensors[f["name"]] is not None]
    halves_given = sorted((f for f in given if f["kind"] == "half"), key=lambda f: f["role"] == "inout")
    like = halves_given[0]["name"] if halves_given else None
    for f in sorted(given, key=lambda f: f["name"] != like):       # first: the others are not blamed for its faults
        name, t = row.shown[f["name"]], tensors[f["name"]]
        if t.ndim != len(f["sizes"]):
            raise ValueError(f"{row.called}: {name} has {t.ndim} dimensions, expected {len(f['sizes'])}")
        found, expected, same = dtype_name(t), f["kind"], ""
        if f["kind"] == "half":
            if found not in halves:
                words = _ANYWHERE if row.anywhere else _HALF
                raise TypeError(f"{row.called}: {name} has dtype {found}, expected {words}")
            expected, same = dtype_name(tensors[like]), f" (same as {row.shown[like]})"
        if f["kind"] == "real":
            expected, same = f"float32 or {dtype_name(tensors[like])}", f" (as {row.shown[like]})"
        if found != expected and found not in expected.split(" or "):
            raise TypeError(f"{row.called}: {name} has dtype {found}, expected {expected}{same}")
    sizes = {}
    for f in given:
        for i, n in enumerate(tensors[f["name"]].shape):
            size = f["sizes"][i]
            name = row.shown[f["name"]]
            expected, first, _ = sizes.setdefault(size, (n, name, i))
            if n != expected:
                raise ValueError(f"{row.called}: {name} has size {n} in dimension {i}, expected {expected} ({size} of "
                                 f"{first})")
    numbers = {f["name"]: _number(row.called, f, numbers[f["name"]]) for f in row.numbers}
    known = dict.fromkeys(row.sizes, -1) | {size: n for size, (n, _, _) in sizes.items()}
    known |= {name: t is not None for name, t in tensors.items()} | numbers
    broken = row.derive(known)
    if broken:
        text = broken["name"]
        found = {f"{size} = {n} (dimension {i} of {first})": size for size, (n, first, i) in sizes.items()}
        found |= {f"{let} = {known[let]}": let for let, _, _ in row.lets if known[let] >= 0}
        for name in (f["name"] for f in row.arguments if f["name"] in known):
            value = f"{numbers[name]:g}" if name in numbers else "given" if known[name] else "missing"
            found[f"{row.shown[name]} is {value}"] = name
        found = ", ".join(words for words, name in found.items() if _mentions(text, name))
        error = NotImplementedError if broken["role"] == "takes" else ValueError
        raise error(f"{row.called}: {found}, expected {broken['text'] or text}")
    lets = {size: text for size, text, _ in row.lets}
    for f in given:
        for i, (n, size) in enumerate(zip(tensors[f["name"]].shape, f["sizes"])):
            if size in lets and n != known[size]:
                raise ValueError(f"{row.called}: {row.shown[f['name']]} has size {n} in dimension {i}, expected "
                                 f"{known[size]} ({size} = {lets[size]})")


def _number(op, f, value):
    """As `_C` takes it, or refused in its words."""
    if f["kind"] == "float":
        return _shared.number(op, f["name"], value)
    if f["kind"] == "bool":
        return bool(value)
    if f["kind"] in ("int64", "uint64"):
        return _shared.integer(op, f["name"], value)
    if isinstance(value, float) or not hasattr(value, "__index__") or not -2**31 <= value.__index__() < 2**31:
        raise TypeError(f"{op}: {f['name']} is {value!r}, expected an integer of 32 bits")
    return value.__index__()


def _mentions(text, name):
    return re.search(rf"\b{name}\b", text)


def _named(fields, values):
    return dict(zip((f["name"] for f in fields), values))


# One body for all libraries: results from `empty`, then C. `want` leaves out results that may be absent.
_MAKE = """
def make({signature}{want}):
    try:
        {allocate}
        {threads}C({arguments})
    except Exception:
        {written} = again(({inputs}){want_given})
    return {written}
"""


def _make(row, place="", threads="", **known):
    made = (*row.results, *row.saves, *row.work)
    lines = row.sizes_of(made) + [f"{f['name']} = {row.new(f, place)}" +
                                  (f" if want[{row.optional.index(f)}] else None" if f in row.optional else "")
                                  for f in made]
    text = _MAKE.format(signature=row.signature(), want=_want(row),
                        allocate="\n        ".join(lines), threads=threads, arguments=names(row.arguments),
                        written=written(row), inputs="".join(f["name"] + ", " for f in (*row.inputs, *row.numbers)),
                        want_given=", want" if row.optional else ", ()")
    return compiled(row.name, text, C=getattr(_C, row.name), **known)["make"]


def _want(row):
    """The last argument of an eager call: which of the optional results it asks for. The others are None. The operator
    has no such argument, and computes all."""
    return f", want={(True,) * len(row.optional)}" if row.optional else ""


def written(row):
    return names([*row.results, *row.saves])


def _again(row, inputs, want, verify, empty, copied, writable, copy_back):
    """After a refusal by C: the reason in Python's words; or, where only an address or a stride was refused, the same
    on copies, and on results that are dense whatever the inputs are."""
    verify(inputs)
    tensors, values = _named(row.inputs, inputs), _named(row.numbers, inputs[len(row.inputs):])
    wanted = dict(zip((f["name"] for f in row.optional), want))
    made = {f["name"]: empty(f, inputs) if wanted.get(f["name"], True) else None
            for f in (*row.results, *row.saves, *row.work)}
    copies = {f["name"]: t if t is None else copied(f, t) for f in row.inputs for t in (tensors[f["name"]],)}
    # the others are dense, and not in tiles
    halves = {f["name"] for f in row.arguments if f["kind"] == "half" and f["role"] in ("out", "optout")}
    targets = {name: writable(t) if name in halves and t is not None else t for name, t in made.items()}
    known = copies | targets | values
    getattr(_C, row.name)(*(known[f["name"]] for f in row.arguments))
    for name, t in made.items():
        if t is not None:
            copy_back(t, targets[name])
    results = [made[f["name"]] for f in (*row.results, *row.saves)]
    return results if len(results) > 1 else results[0]


_again = _shared.one_exception(_again)


# ---- NumPy


def _numpy_function(row):
    import numpy as np

    from margay import _numpy

    def verify(inputs):
        tensors = _named(row.inputs, inputs)
        _numpy.check_kinds(row.called, row.may_miss, **row.as_shown(tensors))
        check(row, tensors, _named(row.numbers, inputs[len(row.inputs):]), lambda a: str(a.dtype),
              ("float16", "float32"))

    def copied(f, a):
        reason = _numpy.why_copied(a, f["role"] == "mat") if f["kind"] == "half" else _numpy.why_dense(a)
        return a if reason is None else np.ascontiguousarray(a)

    known = dict(empty=np.empty, empty_like=np.empty_like, dtypes={"float32": np.float32, "int32": np.int32})
    alone = _new_alone(row, dict(known, empty_like=lambda a: np.empty(a.shape, a.dtype)))

    def again(inputs, want):
        return _again(row, inputs, want, verify, lambda f, inputs: alone(f["name"])(*inputs), copied, lambda a: a,
                      lambda a, target: None)

    made = _make(row, again=again, **known)
    return _only_results(row, made)


_LINES = """
def {name}({signature}):
    {lines}
"""


def _new_alone(row, known, place=""):
    """A function of a field, which gives the function that makes its tensor."""
    @functools.cache
    def of(name):
        f = next(f for f in row.arguments if f["name"] == name)
        lines = row.sizes_of([f]) + [f"return {row.new(f, place)}"]
        text = _LINES.format(name="new", signature=row.signature(), lines="\n    ".join(lines))
        return compiled(row.name, text, **known)["new"]
    return of


def _only_results(row, made):
    if not row.saves:
        return made
    n = len(row.results)
    return lambda *inputs: made(*inputs)[0] if n == 1 else made(*inputs)[:n]


# ---- PyTorch

_CALL = """
def call({signature}{want}):
    if is_compiling() or {absent}not plain({tensors}):
        check_kinds({name!r}, {optional}, {given})
        {results} = seen({all})
        return {returned}
    if autocast_anywhere() and is_autocast_enabled({first}.device.type):
        {halves} = autocast({first}.device.type, {halves}){reals_cast}
    if is_grad_enabled() and ({gradient}):
        return record({all}{want_given})
    {results} = make({all}{want_given})
    return {returned}
"""

_FORWARD = """
def forward(ctx, {all}{want_given}):
    {written} = make({all}{want_given})
    ctx.save_for_backward({saved})
    ctx.numbers = ({numbers})
    ctx.half = {half}.dtype
    ctx.set_materialize_grads({zeros})
    return {returned}
"""


def _torch_function(row):
    import torch

    from margay import _torch as t
    from margay import _transforms

    inputs, numbers = [f["name"] for f in row.inputs], [f["name"] for f in row.numbers]
    reals = [f["name"] for f in row.inputs if f["kind"] == "real"]
    every, tensors = ", ".join(inputs + numbers), ", ".join(inputs)
    known = dict(empty=torch.empty, empty_like=torch.empty_like,
                 dtypes={"float32": torch.float32, "int32": torch.int32, "float8_e4m3fn": torch.float8_e4m3fn})
    place = f", device={row.first}.device"

    def verify(values):
        given = _named(row.inputs, values)
        t.check_kinds(row.called, row.may_miss, **row.as_shown(given))
        check(row, given, _named(row.numbers, values[len(inputs):]), _shared.dtype_name,
              ("bfloat16", "float16", "float32"))
        if not row.anywhere:
            t.check_devices(row.called, **row.as_shown({name: given[name] for name in row.halves}))
        t.check_same_device(row.called, **row.as_shown(given))

    def copied(f, x):
        return x.contiguous() if f["kind"] != "half" else t.mappable_matrix(x) if f["role"] == "mat" else t.mappable(x)

    dense = dict(known, empty_like=t.dense_like)
    alone = _new_alone(row, dense, place)

    def again(values, want):
        return _again(row, values, want, verify, lambda f, values: alone(f["name"])(*values), copied, t.mappable_empty,
                      t.copy_back)

    direct = _direct[row.name] = _make(row, place, f"{row.first}.is_cuda or use_threads(); ", again=again,
                                       use_threads=t.use_torch_threads, **known)
    made = (*row.results, *row.saves)
    lines = [f"verify(({every}, ))", *row.sizes_of(made), "return " + ", ".join(row.new(f, place) for f in made)]
    text = _LINES.format(name="fake", signature=row.signature(), lines="\n    ".join(lines))
    fake = compiled(row.name, text, verify=verify, **dense)["fake"]

    backward = Row(row.name + "_bwd") if row.name + "_bwd" in ROWS else None
    if row.name in _gradients:
        gradient, saved = _gradients[row.name], inputs
    elif backward:
        gradient, saved = _gradient_by_names(torch, t, row, backward, alone)
    else:
        gradient, saved = _no_gradient(row), []
    zeros = bool(backward) and row.name not in _gradients and not _makes_zeros(row, backward, saved)

    def save(ctx, inputs, output):
        # the dispatcher leaves out defaults
        values = (*inputs, *(default(f) for f in row.numbers[len(inputs) - len(row.inputs):]))
        kept = _named(row.inputs, values) | _named((*row.results, *row.saves),
                                                   output if isinstance(output, tuple) else (output,))
        ctx.save_for_backward(*(kept[name] for name in saved))
        ctx.numbers = values[len(row.inputs):]
        ctx.half = kept[row.halves[0]].dtype
        ctx.set_materialize_grads(zeros)

    want_given = ", want" if row.optional else ""
    text = _FORWARD.format(all=every, written=written(row), saved=", ".join(saved), returned=names(row.results),
                           numbers="".join(name + ", " for name in numbers), want_given=want_given, zeros=zeros,
                           half=row.halves[0])

    class Record(torch.autograd.Function):
        forward = staticmethod(compiled(row.name, text, make=direct)["forward"])
        backward = staticmethod((lambda ctx, *grads: (*gradient(ctx, *grads), None)) if row.optional else gradient)

    cast_halves = t.as_the_first if row.name.removesuffix("_bwd") in _shared.own_dtype else t.autocast

    def autocast(*values):
        with t.without_autocast_keys():
            given = _named(row.inputs, values)
            cast = dict(zip(row.halves, cast_halves(values[0].device.type, *(given.get(name) for name in row.halves))))
            cast |= zip(reals, t.reals_like(cast[row.halves[0]], *map(given.get, reals)))
            return seen(*(cast.get(name, x) for name, x in given.items()), *values[len(inputs):])

    # A backward computes in the forward's dtype, in which tensors were saved: a cast would change what they say.
    t.register(row.name.removesuffix("_bwd"), row.schema(), direct, fake,
               _rules.get(row.name) or _samples_by_row(_transforms, row), gradient, save,
               None if row.name.endswith("_bwd") else autocast)
    seen = getattr(torch.ops.margay, row.name)
    needed = [name for name in inputs[1:] if name not in row.absent]
    text = _CALL.format(name=row.called, signature=row.signature(), tensors=tensors, all=every, first=row.first,
                        want=_want(row), want_given=want_given,
                        results=written(row), returned=names(row.results),
                        given=", ".join(f"{row.shown[name]}={name}" for name in inputs), optional=row.may_miss,
                        absent="".join(f"{name} is None or " for name in needed),
                        halves="".join(name + ", " for name in row.halves),
                        reals_cast=f"\n        {', '.join(reals)}, = reals_like({row.halves[0]}, {', '.join(reals)})"
                        if reals else "",
                        gradient=" or ".join(f"{name} is not None and {name}.requires_grad" if name in row.absent
                                             else f"{name}.requires_grad" for name in inputs))
    return compiled(row.name, text, is_compiling=torch.compiler.is_compiling, plain=t.c_may_read, seen=seen,
                    check_kinds=t.check_kinds, autocast_anywhere=t.autocast_anywhere,
                    is_autocast_enabled=torch.is_autocast_enabled, autocast=cast_halves, reals_like=t.reals_like,
                    is_grad_enabled=torch.is_grad_enabled, record=super(torch.autograd.Function, Record).apply,
                    make=direct)["call"]


def _samples_by_row(transforms, row):
    """vmap: samples become part of the batch where all tensors that have any begin with B."""
    batched = [f["sizes"][:1] == ("B",) for f in row.inputs]
    always = all(f["sizes"][:1] == ("B",) for f in (*row.results, *row.saves))

    def rule(op, info, in_dims, inputs):
        if not always or any(dim is not None and not has for dim, has in zip(in_dims, batched)):
            return transforms.one_by_one(op, info, in_dims, inputs)
        return transforms.samples_in_batch_of(op, info, in_dims, inputs, batched)
    return rule


def _no_gradient(row):
    backward = row.name.endswith("_bwd")

    def gradient(ctx, *_):
        what = f"{row.name[:-4]}: gradients of gradients (create_graph=True)" if backward else f"{row.name}: gradients"
        raise NotImplementedError(f"{what} are not implemented")
    return gradient


def _check_names(row, backward):
    """A gradient by a name that the forward does not know would be lost without a word."""
    inputs, results, saves, numbers = ([f["name"] for f in fields]
                                       for fields in (row.inputs, row.results, row.saves, row.numbers))
    read, written = ["d" + name for name in results] + inputs + results + saves, ["d" + name for name in inputs]
    for what, fields, expected in (("reads", backward.inputs, read), ("reads", backward.numbers, numbers),
                                   ("writes", backward.results, written)):
        unknown = [f["name"] for f in fields if f["name"] not in expected]
        if unknown:
            raise TypeError(f"{backward.name}: {what} {unknown[0]}; by its row, {row.name} has "
                            f"{', '.join(expected) or 'none'}")


def _makes_zeros(row, backward, saved):
    """Does what is saved say the sizes of the results, for the gradient of one that nothing depends on? Else torch
    makes it."""
    read = {f["name"] for f in backward.inputs if f["role"] != "opt"}
    made = " ".join(text for f in row.results if "d" + f["name"] in read and not _like(row, backward, saved, f)
                    for text in (row.new(f), *row.sizes_of([f])))
    return all(f["name"] in saved or not _mentions(made, f["name"]) for f in row.inputs)


def _like(row, backward, saved, f):
    """What is saved and has the sizes of the result f, where f's twin is not saved."""
    twin = row.twin(f)
    if twin is not None and twin not in saved:
        return next((g["name"] for g in backward.inputs
                     if g["name"] in saved and g["role"] != "opt" and g["sizes"] == f["sizes"]), None)


def _gradient_by_names(torch, t, row, backward, alone):
    """The gradient that the row <op>_bwd computes, and the names of what it wants saved."""
    _check_names(row, backward)
    direct, seen = _direct[backward.name], getattr(torch.ops.margay, backward.name)
    incoming = {"d" + f["name"]: f for f in row.results}
    saved = [f["name"] for f in backward.inputs if f["name"] not in incoming]
    arguments = [f["name"] for f in (*row.inputs, *row.numbers)]
    places = [next((i for i, f in enumerate(backward.results) if f["name"] == "d" + name), None) for name in arguments]
    optional = [arguments.index(f["name"][1:]) for f in backward.optional]
    none = (None,) * len(arguments)
    first, second, are_same = _same.get(row.name, (None, None, None))
    one, other = (arguments.index(name) if first else None for name in (first, second))

    def gradient(ctx, *grads):
        if all(grad is None for grad in grads[:len(row.results)]):
            return none
        known = dict(zip(saved, ctx.saved_tensors)) | _named(row.numbers, ctx.numbers)
        for (name, f), grad in zip(incoming.items(), grads):
            known[name] = grad if grad is None or grad.stride(-1) == 1 else grad.contiguous()
        for f in backward.inputs:
            if known[f["name"]] is None and f["role"] != "opt":        # of a result that nothing depends on
                known[f["name"]] = zeros(incoming[f["name"]], known, ctx.half)
        given = [known[f["name"]] for f in (*backward.inputs, *backward.numbers)]
        need = ctx.needs_input_grad
        plain = not torch.is_grad_enabled() and not t.compiling() and t.c_may_read(*given[:len(backward.inputs)])
        # the operator makes both
        shared = (plain and first and all(i < len(need) and need[i] for i in (one, other))
                  and are_same(known, ctx.half))
        if shared:
            need = tuple(needed and i != other for i, needed in enumerate(need))
        if plain:
            made = direct(*given, want=[i < len(need) and need[i] for i in optional]) if optional else direct(*given)
        else:
            made = seen(*given)
        made = made if isinstance(made, (tuple, list)) else (made,)
        grads = [None if i is None or not (k < len(need) and need[k]) else made[i] for k, i in enumerate(places)]
        if shared:
            grads[other] = grads[one]
        return tuple(grads)

    def zeros(f, known, half):
        like = _like(row, backward, saved, f)
        if like:
            return torch.zeros_like(known[like], dtype=half)
        return torch.zeros_like(alone(f["name"])(*map(known.get, arguments)))
    return gradient, saved


# ---- the function


def function(name, gradient=None, rule=None, same=None):
    """The op's function. gradient(ctx, *grads): where no row <name>_bwd says it; ctx.saved_tensors are the inputs,
    ctx.numbers the numbers. rule: of vmap, see _transforms. same: (input, input, f), which have one gradient, and it is
    computed once, where f(what the backward knows by name, dtype of the first half) is true."""
    if same:
        _same[name] = same
    if gradient:
        _gradients[name] = gradient
    if rule:
        _rules[name] = rule

    def call(first, *others):
        made = _made.get((name, type(first)))
        return _first_call(name, first, others) if made is None else made(first, *others)
    return call


def _first_call(name, first, others):
    """Looks only at libraries that are imported."""
    torch, numpy, kind = sys.modules.get("torch"), sys.modules.get("numpy"), type(first)
    if torch is not None and issubclass(kind, torch.Tensor):
        for_torch(name)
        made = getattr(_for_torch, name)
        if torch.compiler.is_compiling():         # which has looked at _made, and would find it changed
            return made(first, *others)
    elif numpy is not None and issubclass(kind, numpy.ndarray):
        made = _numpy_function(Row(name))
    else:
        raise TypeError(f"{name}: {Row(name).first} is {kind.__name__}, expected torch.Tensor or numpy.ndarray")
    _made[name, kind] = made
    return made(first, *others)


def for_torch(name):
    """Makes the function for PyTorch tensors, and torch.ops.margay.<name>, when they are first wanted: that takes some
    2 ms."""
    if hasattr(_for_torch, name):
        return
    with _making:                                    # threads whose first calls come at once
        if not hasattr(_for_torch, name):
            if name + "_bwd" in ROWS:
                for_torch(name + "_bwd")
            setattr(_for_torch, name, _torch_function(Row(name)))


# called, not traced; as torch.compiler.assume_constant_result, without the compiler
for_torch._dynamo_marked_constant = True
_for_torch = types.ModuleType("margay._for_torch")
_making = threading.RLock()
