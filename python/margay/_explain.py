"""What computes a call, and what was built."""

from margay import _shared


class Explanation(str):
    """Text, and `kernels`: the names of the rows of kernels.def that compute the parts of a call, None where no kernel does."""


_EXPLAINED = {"attention": ("q", "k", "v"), "attention_decode": ("q", "k_cache", "v_cache"), "matmul": ("a", "b")}


def explain(op, *tensors, **options):
    """Say which kernel computes a call and why the kernels before it do not.

    `explain(mg.attention, q, k, v, causal=True)` for a call, or `explain("attention_fwd", dtype="bfloat16", gpu=True, d=128)` for any problem.
    `explain(mg.attention_decode, q, k_cache, v_cache, cache_seqlens=1000)` also says into how many splits the keys are cut, and why.
    The result is a string whose `kernels` are the kernels' names: of attention the forward's, and the backward's if it has one.
    """
    from margay import _C

    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if tensors:
        lines, parts = _explain_call(name, tensors, options)
    else:
        names = (name,) if name != "attention" else ("attention_fwd_fp8",) if options.get("dtype") == "float8_e4m3fn" else ("attention_fwd", "attention_bwd")
        lines, parts = [], [_C.explain(part, **options) for part in names]
    explanation = Explanation("\n".join([*lines, *(text for _, text in parts)]))
    explanation.kernels = [kernel for kernel, _ in parts]
    return explanation


def _explain_call(op, tensors, options):
    """Of a dry run of the call, which ends where it has chosen a kernel."""
    import margay
    from margay import _C
    from margay.families.attention import attention, decode

    if op not in _EXPLAINED:
        raise ValueError(f"explain: op is {op}, expected attention, attention_decode or matmul where tensors are given")
    *names, last = _EXPLAINED[op]
    if len(tensors) != len(names) + 1:
        raise TypeError(f"explain: {len(tensors)} tensors are given, expected {', '.join(names)} and {last} for {op}")
    named = dict(zip((*names, last), tensors))
    if _shared.is_torch(op, names[0], tensors[0]):
        from margay import _torch as library
    else:
        from margay import _numpy as library
    library.check_kinds(op, **named)
    if options.get("dropout_p"):
        options = {**options, "dropout_seed": 0}               # none is drawn
    with library.without_gradients():
        parts = [_C.dry_run(lambda: getattr(margay, op)(*tensors, **options))]
        if op == "attention" and _shared.dtype_name(tensors[0]) != "float8_e4m3fn":
            parts.append(_C.dry_run(lambda: attention.backward_workspace(*tensors, **options)))
    if op == "attention_decode":
        more, copied = decode.explain(named, **options)
    else:
        more, copied = [], named
    lines = [f"{op}: " + ", ".join(f"{name} {_shared.shape(t)} {_shared.dtype_name(t)}" for name, t in named.items()), *more]
    lines += [f"  {name} is copied first: {why}" for name, t in copied.items() if (why := library.why_copied(t, op == "matmul", (op, name) != ("attention_decode", "q")))]
    return lines, parts


def info():
    """What was built and what it runs on: kernels, instruction set, threads, driver, devices, and why a GPU is not used."""
    from margay import _C

    return _C.info()
