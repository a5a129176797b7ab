"""Train a small byte-level transformer on real text, with Margay's attention and with PyTorch's, and compare.

Three runs from the same seed on the same batches: attention by Margay, by PyTorch, and by PyTorch with its output disturbed by one rounding
error (a random factor 1 +- eps of the data type). The third says how far rounding alone drives two runs apart, and with that how far the
first two may part: at no step further than PART times the largest distance so far between the disturbed and the undisturbed run.
"""

import argparse
import ast
import os
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import margay as mg
from margay.nn import Attention

PART = 16            # Margay and PyTorch round at several places (scores, weights, output, gradients), the disturbed run at one more
TEXT_BYTES = 1 << 20
SEED = 1234
SIZES = {            # rows, batch, layers, width, heads, kv_heads, steps
    "cpu": dict(rows=128, batch=8, layers=3, width=128, heads=2, kv_heads=1, steps=400),
    "cuda": dict(rows=512, batch=32, layers=6, width=512, heads=8, kv_heads=4, steps=300),
}


# ---- text


def default_text():
    """Documentation of the Python that runs: its help topics, then the docstrings of its standard library, in a fixed order."""
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


# ---- model


class TorchAttention(Attention):
    """Margay's layer with PyTorch's attention inside; `noise`: disturb the output by one rounding error."""

    noise = None

    def attend(self, q, k, v):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.num_kv_heads != self.num_heads)
        if self.noise is not None:
            eps = torch.finfo(out.dtype).eps
            out = out * (1 + eps * (2 * torch.randint(2, out.shape, generator=self.noise, device=out.device, dtype=out.dtype) - 1))
        return out


class Block(torch.nn.Module):
    def __init__(self, layer, width, heads, kv_heads):
        super().__init__()
        self.norm1, self.attention = torch.nn.LayerNorm(width), layer(width, heads, kv_heads)
        self.norm2, self.up, self.down = torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(torch.nn.Module):
    def __init__(self, layer, rows, layers, width, heads, kv_heads):
        super().__init__()
        self.rows = rows
        self.bytes, self.positions = torch.nn.Embedding(256, width), torch.nn.Embedding(rows, width)
        self.blocks = torch.nn.ModuleList(Block(layer, width, heads, kv_heads) for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, 256)
        for table in (self.bytes, self.positions):
            torch.nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens):
        x = self.bytes(tokens) + self.positions.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ---- training


class Run:
    def __init__(self, name, losses, tokens_per_second, model):
        self.name, self.losses, self.tokens_per_second, self.model = name, losses, tokens_per_second, model


def train(name, layer, text, size, device, noise=False):
    torch.manual_seed(SEED)
    shape = {key: size[key] for key in ("rows", "layers", "width", "heads", "kv_heads")}
    model = Transformer(layer, **shape).to(device)
    if noise:
        generator = torch.Generator(device).manual_seed(SEED)
        for block in model.blocks:
            block.attention.noise = generator
    steps, batch, rows = size["steps"], size["batch"], size["rows"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1.0) * (1 - 0.9 * step / steps))
    batches, window, losses = torch.Generator().manual_seed(SEED), torch.arange(rows + 1), []
    start = None
    for step in range(steps):
        if step == min(2, steps - 1):                     # the first steps also load kernels
            synchronize(device)
            start, first = time.perf_counter(), step
        at = torch.randint(len(text) - rows, (batch, 1), generator=batches)
        chunk = text[at + window].to(device, torch.long)
        with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
            logits = model(chunk[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), chunk[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % 10 == 9 or step == steps - 1:
            rate = (step + 1 - first) * batch * rows / (time.perf_counter() - start)
            progress(name, step + 1, steps, f"loss {float(losses[-1]):.4f}  {rate:,.0f} tokens/s")
    synchronize(device)
    rate = (steps - first) * batch * rows / (time.perf_counter() - start)
    print(flush=True)
    return Run(name, torch.stack(losses).double().cpu(), rate, model)


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def progress(name, step, steps, text, width=28):
    """A bar that redraws itself on a terminal; elsewhere only its last state is printed."""
    if not sys.stdout.isatty() and step < steps:
        return
    done = width * step // steps
    start = "\r" if sys.stdout.isatty() else ""
    print(f"{start}{name:<19} [{'#' * done}{'.' * (width - done)}] {step}/{steps}  {text}  ", end="", flush=True)


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


def allowed_distance(torch_losses, disturbed_losses):
    """For every step, how far another run may be from PyTorch's; see the top of this file. The floor is rounding of the loss itself."""
    rounding = 8 * torch.finfo(torch.float32).eps * torch_losses
    return PART * (disturbed_losses - torch_losses).abs().cummax(0).values + rounding


def report(ours, theirs, disturbed, out):
    distance, allowed = (ours.losses - theirs.losses).abs(), allowed_distance(theirs.losses, disturbed.losses)
    steps = len(distance)
    print(f"\n{'step':>6} {'margay':>10} {'torch':>10} {'distance':>10} {'allowed':>10}")
    for step in sorted({0, *(steps * i // 8 for i in range(1, 8)), steps - 1}):
        print(f"{step:>6} {ours.losses[step]:>10.5f} {theirs.losses[step]:>10.5f} {distance[step]:>10.1e} {allowed[step]:>10.1e}")
    worst = int(distance.argmax())
    print(f"largest distance {distance[worst]:.1e} at step {worst}; allowed there {allowed[worst]:.1e}")
    print(f"speed: margay {ours.tokens_per_second:,.0f} tokens/s, torch {theirs.tokens_per_second:,.0f} tokens/s")
    plot(ours, theirs, distance, allowed, out)
    return bool((distance <= allowed).all())          # False for NaN, too


def plot(ours, theirs, distance, allowed, out):
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7), height_ratios=(3, 2), layout="constrained")
    top.plot(theirs.losses, color="tab:orange", linewidth=3, label=f"torch, {theirs.tokens_per_second:,.0f} tokens/s")
    top.plot(ours.losses, color="tab:blue", linewidth=1, label=f"margay, {ours.tokens_per_second:,.0f} tokens/s")
    top.set(ylabel="loss (nats per byte)", title="Byte-level transformer, same seed, two attentions")
    top.legend()
    bottom.semilogy(allowed, color="tab:gray", label="allowed by rounding")
    bottom.semilogy(distance.clamp(min=1e-9), color="tab:red", linewidth=1, label="distance of the losses")
    bottom.set(xlabel="step")
    bottom.legend()
    figure.savefig(out / "demo.png", dpi=130)
    pyplot.close(figure)
    print(f"plot: {out / 'demo.png'}")


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m margay.demo", description=__doc__.split("\n")[0])
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
    size = SIZES[device] | ({"steps": options.steps} if options.steps else {})
    data = options.text.read_bytes() if options.text else default_text()
    if len(data) <= size["rows"]:
        print(f"the text has {len(data)} bytes, expected more than {size['rows']}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads of {os.cpu_count()}"
    print(f"{len(data):,} bytes of text, {'bfloat16 autocast' if device == 'cuda' else 'float32'}, {where}")
    ours = train("margay", Attention, text, size, device)
    theirs = train("torch", TorchAttention, text, size, device)
    disturbed = train("torch, one eps away", TorchAttention, text, size, device, noise=True)
    agree = report(ours, theirs, disturbed, options.out)
    if not agree:
        print("FAILED: the two runs part by more than rounding explains")
        return 1
    print(f"\nsample of the margay run:\n{sample(ours.model, b'The ', 300, device)}\n\nthe two runs agree to rounding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
