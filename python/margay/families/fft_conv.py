"""Long convolution along the sequence by spectra, each head with a filter of its own."""

from margay._shared import dtype_name, functions, is_torch, of_row, rows_library, shape


_ONE_PASS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# float16 of at most so many elements and rows is computed as precise: each row takes a block of 4096 numbers there.
_FEW_ELEMENTS, _FEW_ROWS = 4096, 512


def _dense(t):
    """One pass reads heads one behind another. A copy costs less than blocks."""
    dense = t is None or t.ndim != 3 or t.stride(1) == t.shape[2] or t.shape[1] == 1
    return t if dense else t.contiguous()


def _computed(u):
    """The name of the dtype of u in the computation, which autocast chooses where it is on."""
    return str(rows_library(is_torch("fft_conv", "u", u)).dtype_in_autocast(u)).removeprefix("torch.")


def _wants_precision(u):
    """Errors of one pass go by a row's largest number, those of torch.fft's rounding by each number. In float16, whose
    bits are all in use, the first are 3 times the second where many numbers are averaged, up to 5.5 times of few."""
    if len(getattr(u, "shape", ())) != 3:
        return False
    rows, length = u.shape[0] * u.shape[1], u.shape[2]
    return rows <= _FEW_ROWS and rows * length <= _FEW_ELEMENTS and _computed(u) == "float16"


def _padded_length(u, causal, precise):
    """Of causal rows that one pass takes with zeros behind them; else the rows' own."""
    length = u.shape[2]
    if not causal or precise or length > _ONE_PASS[-1] or not length or _computed(u) == "float32":
        return length
    return next(n for n in _ONE_PASS if n >= length)


class LongFilter:
    """A filter of `fft_conv` with its spectrum, as `fft_conv_filter` makes it. k, skip: what it was made of; to change
    them in place does not change the spectrum."""

    def __init__(self, k, skip, spectrum, length, dtype, causal, precise):
        self.k, self.skip, self.spectrum = k, skip, spectrum
        self.length, self.dtype, self.causal, self.precise = length, dtype, causal, precise

    @property
    def explained_as(self):
        return self.k

    def __repr__(self):
        return (f"LongFilter(k {shape(self.k)}, length {self.length}, {self.dtype}, causal={self.causal}, "
                f"precise={self.precise})")


def fft_conv(u, k, *, causal=True, pregate=None, postgate=None, skip=None, precise=False):
    """out = postgate (k * x + skip x), x = pregate u, where (k * x)_n = sum over j of k[h, j] x[b, h, n - j].

    u, pregate, postgate, out [B, H, L], k [H, Lk] with 1 <= Lk <= L, skip [H]. bfloat16, float16 or float32;
    k and skip are float32 or as u. PyTorch tensors are differentiable; NumPy arrays give NumPy arrays.

    causal: x is zero in front of its first element. False: circular, x has the period L.
    k: also what `fft_conv_filter` returns, whose spectrum is then used again. Options that differ from its own are
        refused.
    precise: products of two parts, some 21 bits, where 11 are used otherwise, for gradients of k and skip too. float32
        is always computed so, and so are these gradients of rows that do not take one pass, and float16 of at most
        4096 elements in 512 rows, unless the filter has been made before.
        Errors are in proportion to the norms |x| |k|. Where results are much smaller than these allow, as differences
        of a smooth row are, or causal rows of a filter that is largest at its end, only `precise` makes them exact.

    Sums are by spectra, with products of matrices (Monarch; Fu, Kumbong, Nguyen, Re, FlashFFTConv, 2023), at
    frequencies between those of the discrete Fourier transform, so that causal rows need no zeros behind them. Lengths
    of a power of two from 64 to 16384 take one pass over memory, and other causal rows of up to 16384 elements are
    copied to the next of them, with zeros behind. Every other row is cut into blocks of 4096, whose spectra go through
    memory, and the work of a row grows with the square of their number. Circular rows of up to 4096 elements, of that
    one pass, are computed two batch entries at a time; a row's rounding then depends on the other's values. An infinity
    or NaN in x reaches its row, and no other.
    """
    spectrum = None
    if isinstance(k, LongFilter):
        _check_filter(k, u, causal, skip, precise)
        k, skip, spectrum, causal, precise = k.k, k.skip, k.spectrum, k.causal, k.precise
    call = functions.get("fft_conv") or of_row("fft_conv")
    precise = precise or spectrum is None and _wants_precision(u)
    if getattr(u, "ndim", 0) == 3 and not precise and is_torch("fft_conv", "u", u):
        length, padded = u.shape[2], _padded_length(u, causal, precise)
        if length != padded and _fits(k, length) and all(t is None or t.shape == u.shape for t in (pregate, postgate)):
            from torch.nn.functional import pad

            u, pregate, postgate = (t if t is None else pad(t, (0, padded - length)) for t in (u, pregate, postgate))
            return call(u, k, skip, pregate, postgate, spectrum, True, False)[..., :length].contiguous()
        if length in _ONE_PASS:
            u, pregate, postgate = map(_dense, (u, pregate, postgate))
    return call(u, k, skip, pregate, postgate, spectrum, bool(causal), bool(precise))


def fft_conv_filter(u, k, *, causal=True, skip=None, precise=False):
    """The spectrum of a filter, for several calls of `fft_conv` with it: `fft_conv(u, fft_conv_filter(u, k))`.

    k, skip, causal and precise as of `fft_conv`. u: rows as those of the calls to come, of which only length, dtype and
    device are taken. Gradients of such a call reach k and skip.
    """
    torch_ = is_torch("fft_conv_filter", "u", u)
    call = functions.get("fft_conv_spectrum") or of_row("fft_conv_spectrum")
    if u.ndim != 3:
        raise ValueError(f"fft_conv_filter: u has {u.ndim} dimensions, expected 3")
    if torch_:
        like = u.new_empty(_padded_length(u, causal, precise) if _fits(k, u.shape[2]) else u.shape[2])
        spectrum = call(like, *(t.detach() if hasattr(t, "detach") else t for t in (k, skip)), bool(causal),
                        bool(precise))
    else:
        import numpy

        spectrum = call(numpy.empty(u.shape[2], u.dtype), k, skip, bool(causal), bool(precise))
    return LongFilter(k, skip, spectrum, u.shape[2], _computed(u), bool(causal), bool(precise))


def _fits(k, length):
    return getattr(k, "ndim", 0) == 2 and 1 <= k.shape[1] <= length


def _check_filter(k, u, causal, skip, precise):
    found = {"causal": (bool(causal), k.causal, True), "precise": (bool(precise), k.precise, False)}
    for name, (given, made, default) in found.items():
        if given not in (made, default):
            raise ValueError(f"fft_conv: {name} is {given}, expected {made}, as of the filter")
    if skip is not None:
        raise ValueError("fft_conv: skip is given, expected None beside a filter of fft_conv_filter, which has its own")
    if not hasattr(u, "shape") or len(u.shape) != 3:
        return
    dtype = _computed(u)
    if u.shape[2] != k.length or dtype != k.dtype:
        cast = "" if dtype == dtype_name(u) else " (by autocast)"
        raise ValueError(f"fft_conv: u has {u.shape[2]} elements in a row and dtype {dtype}{cast}, expected "
                         f"{k.length} and {k.dtype}, as the filter was made for")


def _explained(op, library, named, given):
    """Rows as they are computed: padded, and of a filter with its k."""
    from margay._explain import explain_row

    u, k = given["u"], given["k"]
    if isinstance(k, LongFilter):
        given |= {"k": k.k, "skip": k.skip, "causal": k.causal, "precise": k.precise}
    elif not given.get("precise") and _wants_precision(u):
        given |= {"precise": True}
    notes, copied, calls = explain_row(op, library, named, given)
    length = u.shape[2]
    if not given.get("precise") and is_torch(op, "u", u):
        length = _padded_length(u, given.get("causal", True), False)
    if length != u.shape[2]:
        rows = {name: library.empty((*t.shape[:2], length), None, t) for name in ("u", "pregate", "postgate")
                for t in (given.get(name),) if t is not None}
        notes = [*notes, f"  rows are copied first, to {length} elements with zeros behind them"]
        calls = explain_row(op, library, {}, given | rows)[2]
    return notes, copied, calls


EXPLAINED = {"fft_conv": _explained}
