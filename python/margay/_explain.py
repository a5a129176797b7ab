"""What computes a call, and what was built."""

import sys

from margay import _shared


class Explanation(str):
    """Text, and `kernels`: the names of the rows of kernels.def that compute the parts of a call, None where no kernel
    does."""


def explain(op, *tensors, **options):
    """Say which kernel computes a call and why the kernels before it do not.

    `explain(mg.attention, q, k, v, causal=True)` is a dry run of the call: of every function of margay that takes
    tensors, with all its arguments. It ends where the call has chosen its first kernel; nothing is launched, nothing is
    written. `explain(mg.attention_decode, q, k_cache, v_cache, cache_seqlens=1000)` also says into how many splits the
    keys are cut, and why. `explain("attention_fwd", dtype="bfloat16", gpu=True, d=128)`: for any problem, without
    tensors; op is that of rows of kernels.def. The result is a string whose `kernels` are the kernels' names: the
    forward's, and the backward's if it has one.
    """
    from margay import _C

    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if tensors:
        lines, parts = _explain_call(name, tensors, options)
    else:
        lines, parts = [], [_C.explain(part, **options) for part in _parts_of(name, options.get("dtype"))]
    explanation = Explanation("\n".join([*lines, *(text for _, text in parts)]))
    explanation.kernels = [kernel for kernel, _ in parts]
    return explanation


def _parts_of(name, dtype):
    if name != "attention":
        return [name]
    return ["attention_fwd_fp8"] if dtype == "float8_e4m3fn" else ["attention_fwd", "attention_bwd"]


def _explain_call(op, arguments, options):
    import inspect
    import numbers

    import margay
    from margay import _C, _op

    particular: dict = {}
    for module in {f.__module__ for f in vars(margay).values()
                   if getattr(f, "__module__", "").startswith("margay.families.")}:
        particular |= getattr(sys.modules[module], "EXPLAINED", {})
    ops = sorted(name for name in vars(margay) if name in particular or name in _op.ROWS)
    if op not in ops:
        raise ValueError(f"explain: op is {op}, expected one of {', '.join(ops)} where tensors are given")
    function = getattr(margay, op)
    parameters = inspect.signature(function).parameters
    places = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    *first, last = (p.name for p in places if p.default is p.empty)
    if not len(first) < len(arguments) <= len(places):
        raise TypeError(f"explain: {len(arguments)} tensors are given, expected {', '.join(first)} and {last} for {op}")
    given = dict(zip((p.name for p in places), arguments))
    named = {name: getattr(given[name], "explained_as", given[name]) for name in (*first, last)
             if given[name] is not None and not isinstance(given[name], numbers.Number)}
    if _shared.is_torch(op, places[0].name, arguments[0]):
        from margay import _torch as library
    else:
        from margay import _numpy as library
    library.check_kinds(op, **named)
    if options.get("dropout_p"):
        options = {**options, "dropout_seed" if "dropout_seed" in parameters else "seed": 0}     # none is drawn
    with library.without_gradients():
        try:
            parts = [_C.dry_run(lambda: function(*arguments, **options))]
        except _shared.NoKernel as found:
            parts = [(None, f"  no kernel: {found}")]
        notes, copied, calls = particular.get(op, explain_row)(op, library, named, given | options)
        parts += map(_C.dry_run, calls)
    lines = [f"{op}: " + ", ".join(f"{name} {_shared.shape(t)} {_shared.dtype_name(t)}" for name, t in named.items()),
             *notes]
    return lines + [f"  {name} is copied first: {why}" for name, why in copied.items() if why], parts


# What is particular to an op: lines, why each of its tensors is copied or None, and calls to be run dry besides, as
# EXPLAINED of a family's module says them of ops with a Python face of their own. `named`, what the first line shows,
# may grow.


def explain_row(op, library, named, given):
    """An op of a row. Its backward is asked on memory that nobody reads or writes."""
    from margay import _C, _op

    row = _op.Row(op)
    inputs = [(f, t) for f in row.inputs for t in (given.get(row.shown[f["name"]]),)
              if t is not None and t.ndim == len(f["sizes"])]      # other forms become other arguments of the row
    named |= {row.shown[f["name"]]: t for f, t in inputs}
    why = lambda f, t: (library.why_copied(t, f["role"] == "mat") if f["kind"] == "half"  # noqa: E731
                        else library.why_dense(t))
    copied = {row.shown[f["name"]]: why(f, t) for f, t in inputs}
    if op + "_bwd" not in _op.ROWS:
        return [], copied, []
    backward, like = _op.Row(op + "_bwd"), given[row.first]
    sizes = {size: -1 for f in (*row.arguments, *backward.arguments) for size in f["sizes"]}   # as in C: of none given
    sizes |= {size: n for f, t in inputs for size, n in zip(f["sizes"], t.shape)}
    sizes |= {f["name"]: given.get(f["name"], _op.default(f)) for f in row.numbers}
    for let, _, code in (*row.lets, *backward.lets):
        sizes[let] = int(eval(code, {}, sizes))
    absent = {f["name"] for f in row.inputs} - {f["name"] for f, _ in inputs}
    absent |= {"d" + name for name in absent}
    empty = [_op.default(f) if f["role"] == "num" else
             None if f["name"] in absent or any(sizes[size] < 0 for size in f["sizes"]) else
             library.empty([sizes[size] for size in f["sizes"]],
                           None if f["kind"] in ("half", "real") else f["kind"], like)
             for f in backward.arguments]
    return [], copied, [lambda: getattr(_C, backward.name)(*empty)]


def info():
    """What was built and what it runs on: kernels, instruction set, threads, driver, devices, and why a GPU is not
    used."""
    from margay import _C

    return _C.info()
