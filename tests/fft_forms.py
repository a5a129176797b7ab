"""The long convolution in plain PyTorch, and problems of it."""
import math
import random

import torch

import margay as mg

HALF = (torch.bfloat16, torch.float16)
NAMES = ("u", "k", "skip", "pregate", "postgate")


def formula(u, k, skip=None, pregate=None, postgate=None, causal=True):
    """By torch.fft, in the arguments' own precision (of 16 bits in float32), differentiable. Transforms have the next
    power of two from twice the length: cuFFT makes a plan for each new size, which takes it longer than to compute."""
    out, length = u.dtype, u.shape[-1]
    wide = torch.float64 if out == torch.float64 else torch.float32
    x = u.to(wide) if pregate is None else u.to(wide) * pregate.to(wide)
    n = 1 << (2 * length - 1).bit_length()
    y = torch.fft.irfft(torch.fft.rfft(x, n) * torch.fft.rfft(k.to(wide), n), n)
    y = y[..., :length] if causal else y[..., :length] + y[..., length:2 * length]
    y = y if skip is None else y + skip.to(wide)[:, None] * x
    return (y if postgate is None else y * postgate.to(wide)).to(out)


class Problem:
    """Tensors by name; `results` of a function: out and the gradients."""

    def __init__(self, seed, device, dtype, shape, taps=None, causal=True, given=(), k_dtype=torch.float32, size=1.0):
        g = torch.Generator().manual_seed(seed)
        b, h, n = shape
        taps = n if taps is None else taps
        make = lambda *s, dtype=dtype: torch.randn(s, generator=g).to(dtype)  # noqa: E731
        self.causal, self.dtype, self.length = causal, dtype, n
        self.tensors = {"u": make(b, h, n) * size,
                        "k": (torch.randn(h, taps, generator=g) / math.sqrt(taps)).to(k_dtype)}
        self.tensors |= {name: make(h, dtype=k_dtype) if name == "skip" else make(b, h, n) for name in given}
        self.tensors = {name: t.to(device) for name, t in self.tensors.items()}
        self.dout = make(b, h, n).to(device)
        self.label = (f"seed {seed}: {dtype} {list(shape)} * {taps} {k_dtype} {'causal' if causal else 'circular'} "
                      f"{' '.join(given)}")

    def results(self, function, dtype=None):
        given = {name: t.to(dtype or t.dtype).requires_grad_() for name, t in self.tensors.items()}
        out = function(**given, causal=self.causal)
        grads = torch.autograd.grad(out, list(given.values()), self.dout.to(out.dtype))
        return {"out": out.detach(), **{"d" + name: grad for name, grad in zip(given, grads)}}

    def size_of_sums(self):
        """The root mean square of dk, were the filter as long as the rows: of noise."""
        t, one = self.tensors, torch.ones(1, dtype=torch.float64, device=self.dout.device)
        x, g = (a.detach().double() * t.get(gate, one) for a, gate in ((t["u"], "pregate"), (self.dout, "postgate")))
        return float((x.square().sum(2) * g.square().sum(2) / self.length).sum(0).mean().sqrt().detach())

    def size_of_few(self, name):
        """Of a result of few numbers, by which its error goes: what they may be where their terms do not cancel."""
        t, one = self.tensors, torch.ones(1, dtype=torch.float64, device=self.dout.device)
        pre, post = t.get("pregate", one).detach().double(), t.get("postgate", one).detach().double()
        x, g = t["u"].detach().double() * pre, self.dout.double() * post
        other, factor = {"out": (x, post), "du": (g, pre), "dpregate": (g, t["u"]), "dpostgate": (x, self.dout)}[name]
        return float(t["k"].detach().double().norm(dim=1).max() * factor.detach().double().abs().max()) * rms(other)

    def check(self, precise=False):
        ours = self.results(lambda **given: mg.fft_conv(**given, precise=precise))
        plain, exact = self.results(formula), self.results(formula, torch.float64)
        # One pass computes dk with as many bits as rows have, whatever dtype it has.
        rough = self.dtype in HALF and not precise and (self.causal or self.length & (self.length - 1) == 0)
        rough &= self.length <= 16384
        for name, found in ours.items():
            of = self.tensors[name[1:]] if name != "out" else self.tensors["u"]
            assert found.dtype == of.dtype and found.shape == exact[name].shape
            as_rows = rough and name in ("dk", "dskip")
            few = found.numel() < 10 and self.dtype in HALF and name not in ("dk", "dskip")
            # dskip is one of dk's sums, and those of a short filter are some of all sums that come at once. All of
            # these few may be small by chance.
            of_sums = as_rows or name == "dskip"
            size = self.size_of_sums() if of_sums else self.size_of_few(name) if few else 0.0
            check_errors(f"{self.label}: {name}", found, plain[name].to(self.dtype) if as_rows else plain[name],
                         exact[name], size=size, eps=torch.finfo(self.dtype).eps if as_rows or few else None)
        return ours


def rms(t):
    return float(t.double().square().mean().sqrt())


def check_errors(label, found, plain, exact, factor=4.0, size=0.0, eps=None):
    """The root of the mean square error is at most `factor` times that of torch.fft's result, computed in float32 and
    rounded to the same dtype; of few numbers, whose rounding is a matter of luck, twice that. The worst error is one of
    many alike, where that of rounding has a bound: it may have three times as much. Products of two pieces and
    float32's sums leave 2^-18 of the result's size, or of `size`. Tensor cores cut off what passes a sum's last bit, so
    that error is in proportion to the number: behind gates the largest of 10^5 numbers, products of three normal ones,
    is more than 10 times their root mean square, and its error may be 2^-18 of itself.
    eps: of the numbers that it is computed with, where those of the result are finer; `size` has errors of that too."""
    assert found.isfinite().all(), f"{label}: not finite"
    error, allowed = found.double() - exact, plain.double() - exact
    rounding = 0.0 if eps is None else 0.2 * eps * size * (1 if found.numel() >= 10 else 2)
    eps = eps or torch.finfo(found.dtype).eps
    factor *= 1 if found.numel() >= 100 else 2
    floor = 2**-18 * max(rms(exact), size) + 2**-24 * (found.dtype == torch.float16)
    limit = factor * max(rms(allowed), 0.2 * eps * rms(exact), rounding) + floor
    assert rms(error) <= limit, f"{label}: rms error {rms(error):.3g}, allowed {limit:.3g}"
    limit = 3 * factor * max(float(allowed.abs().max()), eps / 4 * float(exact.abs().max()), rounding)
    limit += max(10 * floor, 2**-18 * float(exact.abs().max()))
    assert float(error.abs().max()) <= limit, f"{label}: error {float(error.abs().max()):.3g}, allowed {limit:.3g}"


def random_problem(seed, device):
    """fp16 of size 10: at 100 a dk of 9338 elements can pass 65504, in float64 and torch.fft, too."""
    r = random.Random(seed)
    gpu = device == "cuda"
    kind = r.random()
    if kind < 0.35:
        n = r.choice((64, 128, 256, 512, 1024, 2048, 4096))
    elif kind < 0.8:
        n = r.choice((r.randrange(1, 300), r.randrange(1, 4097), r.choice((1, 2, 63, 65, 1000, 4095))))
    else:
        n = r.choice((4097, 8192, 8192, 16384, 8191, r.randrange(4097, 12000), *((32768, 20001) if gpu else ())))
    h = r.choice((1, 2, 3, 5, 70, 140)) if n <= 512 or gpu else r.choice((1, 2, 3))
    taps = r.choice((n, n, r.randrange(1, n + 1)))
    dtype = r.choice((*HALF, torch.float32))
    given = tuple(name for name in NAMES[2:] if r.random() < 0.4)
    return Problem(seed, device, dtype, (r.choice((1, 2, 3)), h, n), taps, r.random() < 0.6, given,
                   r.choice((torch.float32, dtype)),
                   r.choice((1.0, 1.0, 10.0 if dtype == torch.float16 else 100.0, 0.01)))
