"""Random problems of the norms, and their formula."""

import random

import torch

import margay as mg
from cases import check_error

WIDTHS = (1, 2, 3, 5, 7, 8, 16, 63, 64, 65, 72, 96, 127, 128, 129, 130, 200, 255, 256, 257, 264, 500, 512, 513, 576,
          768, 1000, 1024, 1025, 1032, 2048, 2049, 2056, 2304, 3072, 4095, 4096, 4097, 4104, 5120, 6144, 8192,
          8193, 8200)
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)


def silu(z):
    return z * torch.sigmoid(z)


def formula(x, weight=None, bias=None, residual=None, z=None, *, rms, eps, zero_centred=False, keep=None, p=0.0,
            size=None, before=True, sums=None):
    """out and what was normalised, in the arguments' own precision. keep: which elements dropout does not drop. sums:
    the dtype to which sums are rounded, if another."""
    u = x if keep is None else torch.where(keep, x / (1 - p) if p < 1 else x, torch.zeros((), dtype=x.dtype))
    u = u if residual is None else u + residual
    u = u if sums is None else u + (u.to(sums) - u).detach()         # gradients may leave its range
    u = u * silu(z) if z is not None and not before else u
    parts = u if size is None else u.unflatten(-1, (-1, size))
    mean = 0 if rms else parts.mean(-1, keepdim=True)
    square = ((parts - mean) ** 2).mean(-1, keepdim=True)
    out = ((parts - mean) / torch.sqrt(square + eps)).reshape(u.shape)
    out = out if weight is None else out * (weight + 1 if zero_centred else weight)
    out = out if bias is None else out + bias
    return out * silu(z) if z is not None and before else out, u


class Problem:
    def __init__(self, seed, device, shape=None, dtype=None, kind=None):
        r, g = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype = dtype or r.choice(DTYPES)
        self.kind = kind or r.choice(("layer", "rms", "gated"))
        width = shape[-1] if shape else r.choice(WIDTHS)
        lead = shape[:-1] if shape else r.choice(((r.randint(1, 40),), (2, r.randint(1, 9)), (3, 1, 2)))
        gap = r.choice((0, 0, 8, 3))
        wide = lambda: r.choice((torch.float32, self.dtype))  # noqa: E731
        far, spread = r.choice((0, 0, 3)), r.choice((1, 1, 0.1))

        def make(*size, dtype=self.dtype, gap=0):
            t = torch.randn(*size[:-1], size[-1] + gap, generator=g) * spread + far
            return t.to(device, dtype)[..., gap // 2:gap // 2 + size[-1]].requires_grad_()
        self.tensors = {"x": make(*lead, width, gap=gap)}
        if r.random() < 0.9:
            self.tensors["weight"] = make(width, dtype=wide())
        self.options = {"eps": r.choice((1e-5, 1e-6, 1e-3))}
        self.residual = self.p = 0
        if self.kind == "gated":
            self.tensors["z"] = make(*lead, width, gap=r.choice((0, 8)))
            sizes = [n for n in (width, width // 2, width // 4, 64, 128) if n and width % n == 0]
            self.options |= {"group_size": r.choice(sizes), "norm_before_gate": r.random() < 0.5}
        else:
            if r.random() < 0.5:
                self.tensors["bias"] = make(width, dtype=wide())
            if r.random() < 0.6:
                self.tensors["residual"] = make(*lead, width, dtype=wide())
            if r.random() < 0.4:
                self.options |= {"dropout_p": r.choice((0.1, 0.25, 0.9)), "seed": r.randrange(2**64)}
            self.p = round(self.options.get("dropout_p", 0) * 65536) / 65536
            self.options["prenorm"] = r.random() < 0.5
            if self.kind == "rms":
                self.options["zero_centred"] = r.random() < 0.3
        self.lead, self.width, self.device = lead, width, device
        self.dout, self.du = (torch.randn(*lead, width, generator=g).to(self.dtype) for _ in range(2))
        self.label = (f"seed {seed}: {self.kind} {self.dtype} {[*lead, width]} gap {gap} far {far} {self.options} "
                      f"{ {name: str(t.dtype)[6:] for name, t in self.tensors.items()} }")

    def kept(self):
        """What dropout keeps, from a call whose result is what dropout made of ones."""
        if not self.p:
            return None
        ones = torch.ones(*self.lead, self.width, dtype=self.dtype, device=self.device)
        p, seed = self.options["dropout_p"], self.options["seed"]
        return mg.rms_norm(ones, dropout_p=p, seed=seed, prenorm=True)[1] != 0

    def results(self, function, cast=lambda t: t):
        given = {name: cast(t.detach()).requires_grad_() for name, t in self.tensors.items()}
        made = function(given)
        out, u = made if isinstance(made, tuple) else (made, None)
        results = (out, u) if self.options.get("prenorm") else (out,)
        douts = [d.to(self.device, t.dtype) for d, t in zip((self.dout, self.du), results)]
        grads = torch.autograd.grad(results, list(given.values()), douts)
        found = {"out": out.detach()} | ({"sum": u.detach()} if len(results) > 1 else {})
        return found | {"d" + name: grad for name, grad in zip(given, grads)}

    def ours(self):
        function = {"layer": mg.layer_norm, "rms": mg.rms_norm, "gated": mg.gated_rms_norm}[self.kind]
        return self.results(lambda given: function(**given, **self.options))

    def in_dtype(self, dtype, keep, sums=None):
        o = self.options
        call = lambda given: formula(**given, rms=self.kind != "layer", eps=o["eps"], keep=keep, p=self.p,  # noqa: E731
                                     zero_centred=o.get("zero_centred", False), size=o.get("group_size"),
                                     before=o.get("norm_before_gate", True), sums=sums)
        return self.results(call, lambda t: t.to(dtype))

    def check(self):
        print(self.label)
        keep = self.kept()
        ours, plain, exact = self.ours(), self.in_dtype(self.dtype, keep), self.in_dtype(torch.float64, keep)
        if not all(t.isfinite().all() for t in plain.values()):        # squares leave float16's range, not ours
            plain = self.in_dtype(torch.float32, keep, self.tensors.get("residual", self.tensors["x"]).dtype)
        for name, found in ours.items():
            of = self.tensors.get(name[1:])
            size = float(exact[name].abs().max())
            # x - mean is as exact as the mean's float32, and becomes larger by 1 / sqrt(variance + eps)
            rough = 2.0**-20 * (1 + size) / self.options["eps"]**0.5 if self.kind == "layer" else 2.0**-18 * (1 + size)
            check_error(f"{self.label}: {name}", found, plain[name], exact[name], 3 if of is not None else 2,
                        (1e-5, rough + 4 * torch.finfo(self.dtype).eps * size))
            expected = of.dtype if of is not None else self.tensors.get("residual", self.tensors["x"]).dtype
            assert found.dtype == (self.dtype if name == "out" else expected), name
            assert found.shape == exact[name].shape
