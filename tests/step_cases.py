"""Random problems for steps of generation, and what results are compared with."""

import random

import torch


class Draw:
    """A random problem; every number of it follows from the seed."""

    def __init__(self, seed, device):
        r = self.r = random.Random(seed)
        self.g, self.device = torch.Generator().manual_seed(seed), device
        kinds = (torch.bfloat16, torch.float16) + (torch.float32,) * (device == "cpu")
        self.dtype = r.choice(kinds)
        self.state_dtype = r.choice((torch.float32, self.dtype))
        self.steps, self.several = (1, False) if r.random() < 0.6 else (r.choice((1, 2, 3, 8)), True)
        self.batch, self.groups = r.choice((1, 2, 3)), r.choice((1, 2))
        self.label = f"seed {seed}: {self.dtype} state {self.state_dtype} {self.batch}x{self.steps}"

    def yes(self, share=0.5):
        return self.r.random() < share

    def new(self, *shape, dtype=None):
        """Dense, or a window of something larger, at an address that may be a multiple of nothing."""
        t = torch.randn(*shape, generator=self.g).to(dtype or self.dtype).to(self.device)
        if self.yes(0.6):
            return t
        room = torch.zeros(*shape[:-1], shape[-1] + self.r.choice((1, 3, 8)), dtype=t.dtype, device=self.device)
        window = room[..., self.r.choice((0, 1)):][..., :shape[-1]]
        return window.copy_(t)

    def maybe(self, *shape, dtype=None):
        return self.new(*shape, dtype=dtype) if self.yes() else None

    def slots(self):
        places = self.batch + self.r.choice((0, 2))
        if places == self.batch and self.yes():
            return self.batch, None
        at = [i if self.yes(0.8) else -1 for i in torch.randperm(places, generator=self.g)[:self.batch].tolist()]
        return places, torch.tensor(at, dtype=self.r.choice((torch.int32, torch.int64)), device=self.device)


def host(*tensors):
    return [t if t is None else t.cpu() for t in tensors]


def compare(label, out, state, exact, size, after, dtype):
    assert out.dtype == dtype and not out.isnan().any() and not state.isnan().any(), label
    error = (out.cpu().double() - exact).abs() - torch.finfo(dtype).eps * exact.abs() - 3e-6 * size - 1e-7
    assert (error <= 0).all(), f"{label}: out {float(error.max()):.2g}"
    bound = (torch.finfo(state.dtype).eps if state.dtype != torch.float32 else 3e-6) * after.abs() + 1e-5
    error = (state.cpu().double() - after).abs() - bound
    assert (error <= 0).all(), f"{label}: state {float(error.max()):.2g}"
