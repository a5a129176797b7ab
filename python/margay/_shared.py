"""What all families share: whose tensors a call has, ops made from rows, numbers and shapes in the words of messages.

Imports nothing: `import margay` stays fast.
"""

import sys

SMALLEST_SCALE = 2.0**-126     # of float32, without loss of precision
LARGEST_SCALE = (2 - 2.0**-23) * 2.0**127


def is_torch(op, name, x):
    """True of a PyTorch tensor, False of a NumPy array. Looks only at libraries that are imported: x would not exist
    without its own."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(x, torch.Tensor):
        return True
    if numpy is not None and isinstance(x, numpy.ndarray):
        return False
    raise TypeError(f"{op}: {name} is {type(x).__name__}, expected torch.Tensor or numpy.ndarray")


def remembered(function):
    """As functools.cache, of one argument, without its imports."""
    known = {}

    def call(key):
        if key not in known:
            known[key] = function(key)
        return known[key]

    return call


def library_of(of_torch, of_numpy):
    """A function of an op, an argument's name and the argument, which gives the module that computes with it. The two
    import it, by statements: torch.compile traces those."""
    libraries = {}   # by type

    def find(op, name, x):
        library = libraries.get(type(x))
        if library is None:
            library = libraries[type(x)] = of_torch() if is_torch(op, name, x) else of_numpy()
        return library

    return find


_INTEGERS = ("int8", "int16", "int32", "int64", "uint8")


def as_int32(op, name, t):
    """Starts and numbers of sequences, which may have other integers. What int32 does not hold becomes the nearest that
    it holds, where no sequence starts either."""
    dtype = dtype_name(t) if hasattr(t, "dtype") else None
    if dtype not in _INTEGERS:
        found = f"a tensor of dtype {dtype}" if dtype else type(t).__name__
        raise TypeError(f"{op}: {name} is {found}, expected a tensor of int32")
    if dtype == "int64":
        t = t.clip(-2**31, 2**31 - 1)
    return t if dtype == "int32" else t.int() if hasattr(t, "int") else t.astype("int32")


def starts_of_all(op, starts, q):
    """Starts of packed sequences as int32. Where they are on the CPU, the last sequence has to end with q's last step:
    steps behind it would have no result. That they begin with 0 and do not fall is seen by C."""
    starts = as_int32(op, "cu_seqlens", starts)
    torch = sys.modules.get("torch")
    seen = not getattr(starts, "is_cuda", False) and starts.ndim == 1 and len(starts) and q.ndim == 4
    if torch is not None and isinstance(starts, torch.Tensor):
        seen = seen and not starts.is_meta and not torch.compiler.is_compiling()
    if seen:
        last, steps = int(starts[-1]), q.shape[1]
        if last < steps:
            raise ValueError(f"{op}: cu_seqlens[{len(starts) - 1}] is {last}, expected {steps} (the steps that there "
                             "are)")
    return starts


def rows_library(torch_):
    """What ops of rows compute with beside them."""
    if torch_:
        from margay import _torch as library
    else:
        from margay import _numpy as library
    return library


functions: dict = {}   # of rows of ops.def, by name
own_dtype: set = set()  # of rows whose first tensor autocast leaves as it is; the others follow that
gradients: dict = {}   # written by hand, of rows that no row <name>_bwd says them of; see _op.function


def of_row(name):
    from margay import _op

    return functions.setdefault(name, _op.function(name))


def number(op, name, x):
    try:
        return float(x)
    except OverflowError:
        found = f"an integer of {x.bit_length()} bits" if isinstance(x, int) else "too large"
        raise ValueError(f"{op}: {name} is {found}, expected a number that float32 can hold") from None
    except (TypeError, ValueError):
        raise TypeError(f"{op}: {name} is {x!r}, expected a number") from None


def integer(op, name, x):
    if isinstance(x, int):                         # torch.compile traces no __index__
        return x
    if isinstance(x, float) or not hasattr(x, "__index__"):
        raise TypeError(f"{op}: {name} is {x!r}, expected an integer")
    return int(x)


def checked_scale(op, scale):
    """A positive scale as a float, 0 for the default."""
    if scale is None:
        return 0.0
    scale = number(op, "scale", scale)
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise ValueError(f"{op}: scale is {scale:g}, expected a positive finite number")
    return scale


class NoKernel(Exception):
    """Ends a dry run of what no kernel computes, and says what does."""


def one_exception(function):
    """Of a function that is called where an exception is handled: what it raises stands alone."""
    def called(*arguments):
        try:
            return function(*arguments)
        except Exception as error:
            raise error from None
    return called


def dtype_name(t):
    return str(t.dtype).removeprefix("torch.")


def memory_order(strides):
    """The dimensions before the last from the outermost to the innermost in memory."""
    return sorted(range(len(strides) - 1), key=lambda i: -strides[i])


def shape(t):
    return list(t.shape)


def check_rank(op, name, t, rank, layout):
    if t.ndim != rank:
        raise ValueError(f"{op}: {name} has shape {shape(t)}, expected {rank} dimensions {layout}")


def check_dtype(op, name, t, other_name, other):
    if t.dtype != other.dtype:
        raise TypeError(f"{op}: {name} has dtype {dtype_name(t)}, expected {dtype_name(other)} (same as {other_name})")


def mismatch(op, name, t, what, dim, other_name, other):
    raise ValueError(f"{op}: {name} has shape {shape(t)}, expected {what} {other.shape[dim]} in dimension {dim} "
                     f"(same as {other_name}, which has shape {shape(other)})")
