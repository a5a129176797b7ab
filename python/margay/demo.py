"""Train a small byte-level model on real text, with Margay's functions and with PyTorch's, and compare.

The model is a transformer, or with --model hybrid layers of Mamba-2, of Gated DeltaNet and one of attention. Two runs
start from the same weights and see the same batches; their steps are timed in turn. Free runs part, as rounding grows
from step to step. So the verdict is taken on common ground: at CHECKS steps the gradients of all weights are computed
on the weights of PyTorch's run, with either functions, and by TWINS twins: PyTorch's functions with their inputs, their
outputs and the gradients of these disturbed by one rounding error each (a random factor 1 +- eps of the data type), and
so the sums of logarithms of a scan's decays. Margay's gradients may be at most FACTOR times as far from PyTorch's as
the furthest twin's are, in distance and in length.
"""

import argparse
import ast
import math
import os
import statistics
import sys
import sysconfig
import time
from pathlib import Path

from margay import _needs

PROGRAM = "margay.demo"
if __name__ == "__main__":
    _needs.torch(PROGRAM)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import margay as mg  # noqa: E402
from margay.nn import Attention, GatedDeltaNet, Mamba2  # noqa: E402

TWINS = 6
FACTOR = 8           # 64 times as many independent roundings lead 8 times as far; a score alone has head_dim of them
CHECKS = 8
TEXT_BYTES = 1 << 20
SEED = 1234
# layers: A is one of attention, with an MLP, M is one of Mamba-2, D is one of Gated DeltaNet
SIZES = {
    ("transformer", "cpu"): dict(rows=512, batch=2, layers="AAA", width=128, heads=2, head_dim=128, steps=400,
                                 rate=2e-3),
    ("transformer", "cuda"): dict(rows=2048, batch=16, layers="AAAAAA", width=512, heads=8, head_dim=64, steps=400,
                                  rate=5e-4),
    ("hybrid", "cpu"): dict(rows=512, batch=2, layers="MDA", width=128, heads=2, head_dim=64, steps=250, rate=2e-3),
    ("hybrid", "cuda"): dict(rows=2048, batch=16, layers="MDAMDM", width=512, heads=8, head_dim=64, steps=400,
                             rate=5e-4),
}


# ---- text


def default_text():
    """Documentation of the Python that runs: its help topics, then the docstrings of its standard library, in a fixed
    order."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        topics = {}
    parts, size = [topics[name] for name in sorted(topics)], sum(map(len, topics.values()))
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if size >= TEXT_BYTES:
            break
        parts.append(docstrings(path))
        size += len(parts[-1])
    return "\n\n".join(parts).encode()[:TEXT_BYTES]


def docstrings(path):
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return "\n\n".join(text for text in texts if text)


# ---- functions


def margay_attention(q, k, v):
    return mg.attention(q, k, v, causal=True)


def margay_mix(layer, xbc, dt):
    """The convolution and the scan of a layer of Mamba-2: y of the columns x, B, C and the time steps."""
    return Mamba2.mix(layer, xbc, dt)[0]


def margay_delta(layer, qkv, g, beta):
    """The convolution and the gated delta rule of a layer of the columns q, k, v, of its raw gates and betas."""
    return GatedDeltaNet.mix(layer, (qkv,), layer.gates(g, beta))[0]


def torch_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def torch_mix(layer, xbc, dt, disturb=lambda t: t):
    """The same in PyTorch, by chunks of 64 steps, between tensors of 16 bits under autocast in float32. disturb: what
    is done to what is rounded on the way."""
    with torch.autocast(xbc.device.type, enabled=False):
        size, steps, more = xbc.dtype, xbc.shape[1], -xbc.shape[1] % 64
        xbc = F.conv1d(F.pad(xbc.float().mT, (layer.d_conv - 1, 0)), layer.conv1d.weight, layer.conv1d.bias,
                       groups=xbc.shape[2])
        xbc = disturb(F.silu(xbc).mT.to(size)).float()
        dt = F.softplus(dt.float() + layer.dt_bias)
        x, b, c, dt = (F.pad(t, (0, 0, 0, more)).unflatten(1, (-1, 64)) for t in
                       (*xbc.split((layer.d_ssm, layer.d_state, layer.d_state), dim=2), dt))
        x = x.unflatten(3, (layer.nheads, -1))
        sums = disturb((dt * -layer.A_log.exp()).cumsum(2)).movedim(3, 2)      # [batch, chunk, head, step]
        decay = (sums[..., None] - sums[..., None, :]).masked_fill(
            torch.ones(64, 64, dtype=torch.bool, device=x.device).triu(1), -math.inf).exp()
        wide = (x * dt[..., None]).movedim(3, 2)                               # [batch, chunk, head, step, column]
        y = (decay * (c @ b.mT)[:, :, None]) @ wide
        added = (wide * (sums[..., -1:] - sums).exp()[..., None]).mT @ b[:, :, None]
        state = torch.zeros_like(added[:, 0])
        before = []
        for i in range(added.shape[1]):
            before.append(state)
            state = state * sums[:, i, :, -1, None, None].exp() + added[:, i]
        y = y + sums.exp()[..., None] * (c[:, :, None] @ torch.stack(before, 1).mT)
        y = y.movedim(2, 3) + layer.D[:, None] * x
        return y.flatten(1, 2)[:, :steps].flatten(2).to(size)


def torch_delta(layer, qkv, g, beta, disturb=lambda t: t):
    """The same in PyTorch, by chunks of 64 steps, as torch_mix."""
    with torch.autocast(qkv.device.type, enabled=False):
        size, steps, more = qkv.dtype, qkv.shape[1], -qkv.shape[1] % 64
        qkv = F.conv1d(F.pad(qkv.float().mT, (layer.conv_size - 1, 0)), layer.conv1d.weight, layer.conv1d.bias,
                       groups=qkv.shape[2])
        qkv = disturb(F.silu(qkv).mT.to(size)).float()
        g = -layer.A_log.exp() * F.softplus(g.float() + layer.dt_bias)
        q, k, v, g, beta = (F.pad(t, (0, 0, 0, more)).unflatten(1, (-1, 64)) for t in
                            (*qkv.split((layer.key_dim, layer.key_dim, layer.value_dim), dim=2), g,
                             torch.sigmoid(beta.float())))
        q, k, v = (t.unflatten(3, (layer.num_heads, -1)).movedim(3, 2) for t in (q, k, v))   # [batch, chunk, head, ..]
        q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
        sums, beta = disturb(g.cumsum(2)).movedim(3, 2), beta.movedim(3, 2)                  # [.., head, step]
        decay = (sums[..., None] - sums[..., None, :]).masked_fill(
            torch.ones(64, 64, dtype=torch.bool, device=q.device).triu(1), -math.inf).exp()
        identity = torch.eye(64, device=q.device)
        inverse = torch.linalg.solve_triangular(
            identity + (decay * (k @ k.mT)).tril(-1) * beta[..., None, :], identity, upper=False, unitriangular=True)
        values, reads = (beta[..., None] * (inverse @ t) for t in (v, sums.exp()[..., None] * k))
        writes = k * (sums[..., -1:] - sums).exp()[..., None]
        scores, queries = decay * (q @ k.mT), sums.exp()[..., None] * q
        state, out = torch.zeros_like(writes[:, 0].mT @ v[:, 0]), []
        for i in range(q.shape[1]):
            u = values[:, i] - reads[:, i] @ state
            out.append(queries[:, i] @ state + scores[:, i] @ u)
            state = state * sums[:, i, :, -1, None, None].exp() + writes[:, i].mT @ u
        out = layer.head_dim ** -0.5 * torch.stack(out, 1)
        return out.movedim(2, 3).flatten(1, 2)[:, :steps].to(size)


class Functions:
    """Those that a model's layers call."""

    def __init__(self, attention, mix, delta):
        self.attention, self.mix, self.delta = attention, mix, delta


def functions_of(name):
    return (Functions(margay_attention, margay_mix, margay_delta) if name == "margay"
            else Functions(torch_attention, torch_mix, torch_delta))


class Twin:
    """PyTorch's functions with one rounding error more in their inputs and outputs, and in the gradients of each."""

    def __init__(self, seed, device):
        self.generator = torch.Generator(device).manual_seed(seed)

    def attention(self, q, k, v):
        q, k, v = (Disturb.apply(x, self) for x in (q, k, v))
        return Disturb.apply(torch_attention(q, k, v), self)

    def mix(self, layer, xbc, dt):
        disturb = lambda t: Disturb.apply(t, self)  # noqa: E731
        return disturb(torch_mix(layer, disturb(xbc), disturb(dt), disturb))

    def delta(self, layer, qkv, g, beta):
        disturb = lambda t: Disturb.apply(t, self)  # noqa: E731
        return disturb(torch_delta(layer, *map(disturb, (qkv, g, beta)), disturb))

    def disturb(self, x):
        sign = 2 * torch.randint(2, x.shape, generator=self.generator, device=x.device, dtype=x.dtype) - 1
        return x * (1 + torch.finfo(x.dtype).eps * sign)


class Disturb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, twin):
        ctx.twin = twin
        return twin.disturb(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.twin.disturb(grad), None


# ---- model


class SelfAttention(Attention):
    """Margay's layer, in which the function can be exchanged."""

    def attend(self, q, k, v):
        return self.functions.attention(q, k, v)

    def parts(self):
        """{name of a weight: ((group, rows), ...)}; the others are one group, "others"."""
        return {"qkv_proj.weight": tuple((group, len(self.qkv_proj.weight) // 3) for group in "qkv")}


class StateSpace(Mamba2):
    """The same."""

    def mix(self, xbc, dt, z=None, seq_idx=None, cu_seqlens=None):
        return self.functions.mix(self, xbc, dt), None

    def parts(self):
        return {"in_proj.weight": (("others", self.d_ssm), ("x", self.d_ssm), ("B", self.d_state), ("C", self.d_state),
                                   ("dt", self.nheads)),
                "A_log": (("dt", self.nheads),), "dt_bias": (("dt", self.nheads),)}


class DeltaNet(GatedDeltaNet):
    """The same."""

    def mix(self, qkv, options, cu_seqlens=None, initial_states=(None, None)):
        return self.functions.delta(self, *qkv, options["g"], options["beta"]), None

    def gates(self, g, beta):
        return dict(g=g, beta=beta, A_log=self.A_log, dt_bias=self.dt_bias)

    def parts(self):
        heads = self.num_v_heads
        return {"in_proj_qkv.weight": (("query", self.key_dim), ("key", self.key_dim), ("value", self.value_dim)),
                "in_proj_b.weight": (("beta", heads),), "in_proj_a.weight": (("decay", heads),),
                "A_log": (("decay", heads),), "dt_bias": (("decay", heads),)}


class Block(torch.nn.Module):
    def __init__(self, kind, width, heads, head_dim):
        super().__init__()
        self.norm1, self.mlp = torch.nn.LayerNorm(width), kind == "A"
        if kind == "M":
            self.mixer = StateSpace(width, d_state=head_dim, headdim=head_dim)
            return
        if kind == "D":
            self.mixer = DeltaNet(width, heads, head_dim)
            return
        self.mixer = SelfAttention(width, heads, head_dim=head_dim)
        self.norm2, self.up, self.down = (torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width),
                                          torch.nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)))) if self.mlp else x


class Model(torch.nn.Module):
    """tokens [batch, rows] to logits [batch, rows, 256]. A position begins as the sum of embeddings: of its byte, of
    each of the REACH - 1 bytes before it, and of the position."""

    REACH = 4

    def __init__(self, size):
        super().__init__()
        self.rows, width = size["rows"], size["width"]
        self.bytes, self.positions = torch.nn.Embedding(256 * self.REACH, width), torch.nn.Embedding(self.rows, width)
        self.blocks = torch.nn.ModuleList(Block(kind, width, size["heads"], size["head_dim"])
                                          for kind in size["layers"])
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, 256)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:         # what adds to the residual stream starts smaller, the more of it there is
                scale = (2 * len(self.blocks)) ** -0.5 if name.endswith(("out_proj.weight", "down.weight")) else 1
                torch.nn.init.normal_(weight, std=0.02 * scale)

    def use(self, functions):
        for block in self.blocks:
            block.mixer.functions = functions

    def parts(self):
        return {f"blocks.{i}.mixer.{name}": parts for i, block in enumerate(self.blocks)
                for name, parts in block.mixer.parts().items()}

    def groups(self):
        """Weights that make q, k, v, of Mamba-2 x, B, C, dt, of Gated DeltaNet query, key, value, beta, decay, and all
        other weights."""
        return (*dict.fromkeys(group for parts in self.parts().values() for group, _ in parts if group != "others"),
                "others")

    def forward(self, tokens):
        x = self.positions.weight[:tokens.shape[1]]
        for back in range(self.REACH):
            x = x + F.embedding(F.pad(tokens, (back, 0))[:, :tokens.shape[1]] + 256 * back, self.bytes.weight)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, chunk):
    """Mean nats per byte of chunk [batch, rows + 1]."""
    with torch.autocast("cuda", torch.bfloat16, enabled=chunk.is_cuda):
        logits = model(chunk[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), chunk[:, 1:].flatten())


# ---- training


class Run:
    def __init__(self, name, size, device):
        self.name, self.device, self.losses, self.seconds = name, device, [], []
        torch.manual_seed(SEED)
        self.model = Model(size).to(device)
        self.model.use(functions_of(name))
        steps, warmup = size["steps"], size["steps"] // 10 + 1
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=size["rate"], betas=(0.9, 0.95), fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / warmup, 1) * (0.55 + 0.45 * math.cos(math.pi * step / steps)))

    def step(self, chunk):
        synchronize(self.device)
        start = time.perf_counter()
        loss = loss_of(self.model, chunk)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def end(self):
        """The loss at the end, a mean over the last steps."""
        return statistics.fmean(self.losses[-20:])

    def speed(self, size):
        """Tokens per second of the median step."""
        return size["batch"] * size["rows"] / statistics.median(self.seconds)


def train(text, size, device):
    """Both runs, step by step in turn, and the checks [(step, far)]."""
    ours, theirs = Run("margay", size, device), Run("torch", size, device)
    steps, batch, rows = size["steps"], size["batch"], size["rows"]
    batches, window, checks = torch.Generator().manual_seed(SEED), torch.arange(rows + 1), []
    check_at = {(steps - 1) * i // (CHECKS - 1) for i in range(CHECKS)}
    for step in range(steps):
        at = torch.randint(len(text) - rows, (batch, 1), generator=batches)
        chunk = text[at + window].to(device, torch.long)
        if step in check_at:
            checks.append((step, check(theirs.model, chunk, step)))
        for run in (ours, theirs) if step % 2 else (theirs, ours):
            run.step(chunk)
        if step % 10 == 9 or step == steps - 1:
            progress(step + 1, steps, f"loss {ours.losses[-1]:.3f} with margay, {theirs.losses[-1]:.3f} with torch")
    print(flush=True)
    return ours, theirs, checks


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def progress(step, steps, text, width=28):
    """A bar that redraws itself on a terminal; elsewhere only its last state is printed."""
    if not sys.stdout.isatty() and step < steps:
        return
    done = width * step // steps
    start = "\r" if sys.stdout.isatty() else ""
    print(f"{start}[{'#' * done}{'.' * (width - done)}] {step}/{steps}  {text}  ", end="", flush=True)


@torch.no_grad()
def sample(model, prompt, count, device):
    """`count` bytes after the prompt, drawn at temperature 0.7."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = list(prompt)
    for _ in range(count):
        with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
            logits = model(torch.tensor([tokens[-model.rows:]], device=device))[0, -1]
        tokens.append(int(torch.multinomial(torch.softmax(logits.float().cpu() / 0.7, 0), 1, generator=generator)))
    return bytes(tokens).decode(errors="replace")


# ---- comparison


def check(model, chunk, seed):
    """{group: ((distance, allowed), (change of length, allowed))} of Margay's gradients from PyTorch's, relative."""
    reference = gradients(model, functions_of("torch"), chunk)
    ours = far(gradients(model, functions_of("margay"), chunk), reference)
    twins = [far(gradients(model, Twin(SEED + TWINS * seed + i, chunk.device), chunk), reference) for i in range(TWINS)]
    model.use(functions_of("torch"))
    return {group: tuple((ours[group][i], FACTOR * max(twin[group][i] for twin in twins)) for i in range(2))
            for group in reference}


def gradients(model, functions, chunk):
    model.use(functions)
    names, weights = zip(*model.named_parameters())
    parts, found = model.parts(), {group: [] for group in model.groups()}
    for name, grad in zip(names, torch.autograd.grad(loss_of(model, chunk), weights)):
        groups, rows = zip(*parts.get(name, (("others", len(grad)),)))
        for group, part in zip(groups, grad.split(rows)):
            found[group].append(part)
    return found


def far(grads, reference):
    """{group: (distance, change of length)}: relative to the reference, the root mean square over the group's
    weights."""
    result = {}
    for group, tensors in reference.items():
        shares = []
        for grad, right in zip(grads[group], tensors):
            right = right.double()
            apart = grad.double() - right
            square = right.square().sum()
            shares.append(torch.stack((apart.square().sum() / square, ((apart * right).sum() / square).square())))
        result[group] = tuple(torch.stack(shares).mean(0).sqrt().tolist())
    return result


MEASURES = "distance", "change of length"


def report(ours, theirs, checks, size):
    """Prints the table; returns what rounding does not explain, a line each."""
    wrong, groups = [], ours.model.groups()
    print(f"""
At {len(checks)} steps the gradients of all weights were computed with both functions, on the same weights and batch.
How far Margay's are from PyTorch's, in parts of what rounding allows ({FACTOR} times the furthest of {TWINS} twins that
are one rounding away), for the weights that make {", ".join(groups[:-1])} and for all others:

  step  loss: margay      torch   gradients:""" + "".join(f"{group:>9}" for group in groups))
    for step, found in checks:
        parts = [max(apart / allowed for apart, allowed in found[group]) for group in groups]
        print(f"{step:>6} {ours.losses[step]:>13.4f} {theirs.losses[step]:>10.4f}              "
              + "".join(f"{part:>9.2f}" for part in parts))
        wrong += [f"step {step}, gradients of {group}: {measure} {apart:.1e}, allowed {allowed:.1e}" for group in groups
                  for measure, (apart, allowed) in zip(MEASURES, found[group]) if not apart <= allowed]    # NaN, too
    for i, measure in enumerate(MEASURES):
        medians = {group: [statistics.median(found[group][i][j] for _, found in checks) for j in range(2)]
                   for group in groups}
        print(f"median {measure}: "
              + ", ".join(f"{group} {apart:.1e} (allowed {allowed:.1e})"
                          for group, (apart, allowed) in medians.items()))
    speed, other = ours.speed(size), theirs.speed(size)
    print(f"speed: margay {speed:,.0f} tokens/s, torch {other:,.0f} tokens/s: {speed / other:.2f} times "
          f"(medians of {len(ours.seconds)} steps of each, timed in turn)")
    return wrong


def plot(ours, theirs, checks, size, out):
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7),
                                            height_ratios=(3, 2), layout="constrained")
    top.plot(theirs.losses, color="tab:orange", linewidth=3, label=f"torch, {theirs.speed(size):,.0f} tokens/s")
    top.plot(ours.losses, color="tab:blue", linewidth=1, label=f"margay, {ours.speed(size):,.0f} tokens/s")
    top.set(ylabel="loss (nats per byte)", title="Byte-level model, same seed, same batches, two sets of functions")
    top.legend()
    steps = [step for step, _ in checks]
    groups = ours.model.groups()
    for group, color in zip(groups, matplotlib.colormaps["tab20"].colors):
        apart, allowed = zip(*(found[group][0] for _, found in checks))
        bottom.semilogy(steps, apart, "o-", color=color, markersize=4, label=group)
        bottom.semilogy(steps, allowed, "_", color=color, markersize=12)
    bottom.set(xlabel="step", ylabel="distance of the gradients\n(bars: allowed)")
    bottom.legend(ncols=7)
    figure.savefig(out / "demo.png", dpi=130)
    pyplot.close(figure)
    print(f"plot: {out / 'demo.png'}")


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m margay.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=("transformer", "hybrid"), default="transformer",
                        help="hybrid: layers of Mamba-2, of Gated DeltaNet and one of attention (default: transformer)")
    parser.add_argument("--text", type=Path, help="text to learn (default: the documentation of this Python)")
    parser.add_argument("--steps", type=int, help="training steps of each run")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where margay can use it")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for demo.png (default: the current one)")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps is {options.steps}, expected at least 1")
    if options.text and not options.text.is_file():
        parser.error(f"--text: there is no file {options.text}")
    return options


def choose_device():
    if not torch.cuda.is_available():
        return "cpu"
    reason = mg.info()["gpu_reason"]
    if reason:
        print(f"the GPU is not used: {reason}")
    return "cpu" if reason else "cuda"


def main(arguments=None):
    options = parse(arguments)
    device = options.device or choose_device()
    if device == "cuda":
        _needs.gpu(PROGRAM, "--device cuda", "--device cpu")
    size = SIZES[options.model, device] | ({"steps": options.steps} if options.steps else {})
    data = options.text.read_bytes() if options.text else default_text()
    if len(data) <= size["rows"]:
        _needs.stop(PROGRAM, f"the text has {len(data)} bytes, expected more than {size['rows']}")
    options.out.mkdir(parents=True, exist_ok=True)
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    where = (torch.cuda.get_device_name() if device == "cuda"
             else f"{torch.get_num_threads()} CPU threads of {os.cpu_count()}")
    print(f"{len(data):,} bytes of text, {'bfloat16 autocast' if device == 'cuda' else 'float32'}, {where}")
    ours, theirs, checks = train(text, size, device)
    wrong = report(ours, theirs, checks, size)
    plot(ours, theirs, checks, size, options.out)
    if wrong:
        print("FAILED: Margay's gradients are further from PyTorch's than rounding explains\n" + "\n".join(wrong))
        return 1
    print(f"\nsample of the margay run:\n{sample(ours.model, b'The ', 300, device)}\n")
    print(f"at all {len(checks)} checks Margay's gradients were PyTorch's to rounding; trained apart, the two end at "
          f"{ours.end():.3f} and {theirs.end():.3f} nats a byte")
    return 0


if __name__ == "__main__":
    sys.exit(main())
