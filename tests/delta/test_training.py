"""A small model like Qwen3-Next and one like Kimi Linear, trained from one seed with Margay's rule and with PyTorch's:
the loss curves part as PyTorch's part from each other where each input and result has one rounding error more. How far
that is differs tenfold between two runs: where a gradient is next to 0, Adam's first steps go to either side."""

import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import margay as mg
from conftest import SEED
from delta_forms import by_chunks, gates, normalised, strength

# steps, layers (D: delta rule, A: attention), batch, rows, width, heads, head_dim, disturbed runs
CPU = dict(steps=20, layers="DDA", batch=2, rows=96, width=32, heads=2, head_dim=16, others=6)
GPU = dict(steps=300, layers="DDDA", batch=4, rows=256, width=256, heads=4, head_dim=64, others=3)
KINDS = {"Qwen3-Next": (mg.nn.GatedDeltaNet, dict(num_v_heads=2)),
         "Kimi Linear": (mg.nn.KimiDeltaAttention, dict(lower_bound=None))}


def in_torch(layer, q, k, v, g, beta, A_log, dt_bias, initial_state=None, output_final_state=True, cu_seqlens=None,
             state_v_first=False):
    """Everything in float32."""
    q, k, v = normalised(q.float()), normalised(k.float()), v.float()
    g = gates(g, A_log, dt_bias, getattr(layer, "lower_bound", None))
    out, last = by_chunks(q, k, v, g, strength(beta, layer.allow_neg_eigval))
    return out.to(beta.dtype), last


class Disturb(torch.autograd.Function):
    """One rounding error more."""

    @staticmethod
    def forward(ctx, x):
        return x * (1 + torch.finfo(x.dtype).eps * (2 * torch.randint_like(x, 2) - 1))

    @staticmethod
    def backward(ctx, grad):
        return Disturb.forward(ctx, grad)


class Model(torch.nn.Module):
    def __init__(self, kind, rule, size):
        super().__init__()
        cls, more = KINDS[kind]
        width, heads, dim = size["width"], size["heads"], size["head_dim"]
        self.bytes = torch.nn.Embedding(256, width)
        more = {name: heads * n if name == "num_v_heads" else n for name, n in more.items()}
        self.layers = torch.nn.ModuleList(cls(width, heads, dim, **more) if name == "D" else
                                          mg.nn.Attention(width, heads, head_dim=dim) for name in size["layers"])
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in size["layers"])
        self.head = torch.nn.Linear(width, 256)
        for layer in self.layers:
            if isinstance(layer, cls) and rule != "margay":
                layer._rule = self.ruled(layer, rule)

    @staticmethod
    def ruled(layer, rule):
        def run(*tensors, **options):
            if rule == "torch":
                return in_torch(layer, *tensors, **options)
            options |= {name: Disturb.apply(options[name]) for name in ("g", "beta")}
            out, last = in_torch(layer, *map(Disturb.apply, tensors), **options)
            return Disturb.apply(out), last
        return run

    def forward(self, tokens):
        x = self.bytes(tokens)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.head(x)


def trained(kind, rule, size, device, disturbance=0):
    """Losses of the steps."""
    torch.manual_seed(SEED)
    model = Model(kind, rule, size).to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    torch.manual_seed(SEED + disturbance)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if device == "cpu" else 5e-4, betas=(0.9, 0.95))
    text = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    batches, losses, window = torch.Generator().manual_seed(SEED), [], torch.arange(size["rows"] + 1)
    for _ in range(size["steps"]):
        at = torch.randint(len(text) - size["rows"], (size["batch"], 1), generator=batches)
        chunk = text[at + window].to(device, torch.long)
        loss = F.cross_entropy(model(chunk[:, :-1]).float().flatten(0, 1), chunk[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def compare(kind, size, device):
    """Of ten steps at a time, as one step's losses may be equal by chance."""
    began = time.perf_counter()
    ours, torchs = (trained(kind, rule, size, device) for rule in ("margay", "torch"))
    others = torch.stack([trained(kind, "disturbed", size, device, 1 + i) for i in range(size["others"])])
    parted = lambda curves: (curves - torchs).square().unflatten(-1, (-1, 10)).mean(-1).sqrt()  # noqa: E731
    apart, allowed = parted(ours), parted(others).amax(0)
    values = lambda t: " ".join(f"{x:.0e}" for x in t)  # noqa: E731
    print(f"{kind}: {time.perf_counter() - began:.1f} s, loss {ours[0]:.3f} to {ours[-1]:.3f}; every ten steps apart "
          f"{values(apart)}, of one rounding more {values(allowed)}")
    assert ours.isfinite().all() and ours[-3:].mean() < 0.9 * ours[0]
    assert (apart <= 4 * allowed.cummax(0).values).all()
    assert abs(ours[-10:].mean() - torchs[-10:].mean()) <= 0.02 * torchs[-10:].mean() + 4 * allowed[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_on_the_cpu(kind, one_thread):
    compare(kind, CPU, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_the_gpu(kind):
    compare(kind, GPU, "cuda")
