"""The drop-ins under torch.compile, checkpointing, autocast, CUDA graphs, DDP and FSDP, and in a training run."""

import math
import os
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import margay as mg
from margay import flash_attn, flash_attn_interface
from margay.drop_ins import fallback, padding

pytestmark = pytest.mark.usefixtures("one_thread")
WINDOW = dict(causal=True, window_size=(5, 0), softcap=4.0)


def lengths(*values, device="cpu"):
    return torch.tensor([0, *values]).cumsum(0).to(device, torch.int32)


def make(device="cpu", dtype=torch.float32, rows=20):
    """Drop-ins as functions of one tensor [2, rows, 4, 16], with gradients."""
    torch.manual_seed(0)
    layer = mg.nn.MultiheadAttention(64, 4, batch_first=True, device=device, dtype=dtype)
    cu = lengths(rows // 2, 3, rows * 2 - rows // 2 - 3, device=device)
    mask = torch.arange(rows, device=device) < torch.tensor([[rows - 4], [rows]], device=device)

    def varlen(x, **options):
        return flash_attn.flash_attn_varlen_func(x.flatten(0, 1), x.flatten(0, 1) * 0.5,
                                                 x.flatten(0, 1), cu, cu, rows * 2, rows * 2, **options)

    def sdpa(x, **options):
        x = x.transpose(1, 2)
        return F.scaled_dot_product_attention(x, x * 0.5, x, **options)

    return {
        "dense": lambda x: flash_attn.flash_attn_func(x, x[:, :, :2], x[:, :, 2:], causal=True),
        "dense, options, lse": lambda x:
            sum(t.sum() for t in flash_attn.flash_attn_func(x, x * 0.5, x, return_attn_probs=True, **WINDOW)[:2]),
        "packed": lambda x: flash_attn.flash_attn_qkvpacked_func(torch.stack((x, x * 0.5, x), 2)),
        "varlen": lambda x: varlen(x, causal=True),
        "varlen, options": lambda x: varlen(x, **WINDOW),
        "version 3": lambda x: flash_attn_interface.flash_attn_func(x, x * 0.5, x, causal=True),
        "sdpa": lambda x: sdpa(x, is_causal=True),
        "sdpa, key mask": lambda x: sdpa(x, attn_mask=mask[:, None, None]),
        "layer": lambda x: layer(x.flatten(2), x.flatten(2), x.flatten(2), need_weights=False)[0],
        "layer, padding": lambda x:
            layer(x.flatten(2), x.flatten(2), x.flatten(2), key_padding_mask=~mask, need_weights=False)[0],
        "padding": lambda x: padding.attention("test", *[x.transpose(1, 2)] * 3, mask, mask, causal=True),
    }


NAMES = list(make())


def inputs(device="cpu", dtype=torch.float32, rows=20):
    return torch.randn(2, rows, 4, 16, generator=torch.Generator().manual_seed(1)).to(device, dtype).requires_grad_()


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch):
    monkeypatch.setattr(fallback, "_warned", set())
    with mg.enable_sdpa(), warnings.catch_warnings():
        warnings.simplefilter("error", mg.FallbackWarning)
        yield


# ---- compilation


@pytest.mark.parametrize("name, dynamic", [(name, False) for name in NAMES] +
                         [("dense", True), ("varlen, options", True), ("padding", True)])
def test_compiled(name, dynamic):
    function = make()[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    x = inputs()
    results = [(out := f(x), *torch.autograd.grad(out.square().sum(), x)) for f in (function, compiled)]
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_compiled_by_inductor():
    functions, x = make(), inputs()
    torch._dynamo.reset()
    function = lambda x: (functions["dense"](x), functions["sdpa"](x))
    for a, b in zip(function(x), torch.compile(function, fullgraph=True)(x)):
        torch.testing.assert_close(a, b)


def test_compiled_cache():
    """A decoding step: the cache is written in place, the lengths stay on the device."""
    q, k, v = (torch.randn(2, 1, h, 16) for h in (4, 2, 2))
    caches = [torch.randn(2, 2, 12, 2, 16).unbind(0) for _ in range(2)]
    caches[1] = [t.clone() for t in caches[0]]
    filled = torch.tensor([3, 8], dtype=torch.int32)

    def step(q, k, v, k_cache, v_cache):
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=filled, causal=True)

    expected = step(q, k, v, *caches[0])
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, *caches[1])
    torch.testing.assert_close(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(*caches))


def test_sdpa_in_compiled_code():
    """The graph has Margay's operator."""
    graphs = []

    def backend(graph, example):
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=lambda g, _: graphs.append(str(g.graph)) or g)(graph, example)

    torch._dynamo.reset()
    torch.compile(make()["sdpa"], fullgraph=True, backend=backend)(inputs().detach())
    assert "margay.attention" in graphs[0]


def test_fallback_in_compiled_code():
    warnings.simplefilter("default", mg.FallbackWarning)
    x = torch.randn(1, 5, 2, 300)
    torch._dynamo.reset()
    with pytest.warns(mg.FallbackWarning, match="flash_attn_func: a head dim over 256"):
        found = torch.compile(flash_attn.flash_attn_func, fullgraph=True, backend="aot_eager")(x, x, x)
    torch.testing.assert_close(found, flash_attn.flash_attn_func(x, x, x))


# ---- checkpointing, autocast


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointed(name, reentrant):
    function, x = make()[name], inputs()
    (plain,) = torch.autograd.grad(function(x).square().sum(), x)
    checkpoint(lambda x: function(x).square(), x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(x.grad, plain)


def test_checkpointed_dropout():
    """What is computed again drops what was dropped."""
    x = inputs()
    gradients = []
    for again in (False, True):
        torch.manual_seed(5)
        function = lambda x: flash_attn.flash_attn_func(x, x, x, dropout_p=0.3).square()
        out = checkpoint(function, x, use_reentrant=False) if again else function(x)
        torch.rand(3)
        gradients.append(torch.autograd.grad(out.sum(), x)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", [name for name in NAMES if "lse" not in name])
def test_autocast(name):
    function, x = make()[name], inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = function(x)
    assert out.dtype == torch.bfloat16
    expected = function(x)
    assert (out - expected).abs().max() < 0.03 * expected.abs().max()
    assert torch.autograd.grad(out.sum(), x)[0].dtype == torch.float32


@pytest.mark.parametrize("masks", ("keys", "both"))
def test_padding_may_hold_nan(masks):
    """It reaches neither an output nor a gradient; and the same in fresh memory that holds NaN."""
    mask = torch.arange(20) < torch.tensor([[16], [9]])
    x = inputs(dtype=torch.bfloat16).detach()
    x = torch.where(mask[:, :, None, None], x, math.nan).transpose(1, 2).requires_grad_()
    q = x if masks == "both" else torch.randn(2, 4, 20, 16, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(20):
        rubbish = [torch.full((n,), math.nan) for n in (160, 640, 1280, 2560, 5120) for _ in range(6)]
        del rubbish
        out = padding.attention("test", q, x, x, mask, mask if masks == "both" else None, causal=masks == "both")
        gradients = torch.autograd.grad(out.float().square().sum(), {q, x})
        assert out.isfinite().all() and all(g.isfinite().all() for g in gradients)
        assert masks == "keys" or (out.transpose(1, 2)[~mask] == 0).all()


# ---- CUDA graphs


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_on_the_host(name):
    """With tensors that have no values: whatever asks for one fails."""
    with FakeTensorMode():
        function = make(dtype=torch.bfloat16)[name]
        x = torch.empty(2, 20, 4, 16, dtype=torch.bfloat16, requires_grad=True)
        (dx,) = torch.autograd.grad(function(x).float().sum(), x)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            float(x.sum())
    assert dx.shape == x.shape


@pytest.mark.parametrize("kind", ("pages", "batch index", "leftpad"))
def test_cache_reads_nothing_on_the_host(kind):
    with FakeTensorMode():
        q, k, cache = (torch.empty(shape, dtype=torch.bfloat16)
                       for shape in ((2, 3, 4, 16), (2, 3, 2, 16), (6, 16, 2, 16)))
        cos, filled = torch.empty(64, 8, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int32)
        table = torch.empty(2, 3, dtype=torch.int32)
        options = dict(block_table=table) if kind == "pages" else dict(cache_batch_idx=filled)
        if kind == "leftpad":
            options["cache_leftpad"] = filled
        out = flash_attn.flash_attn_with_kvcache(q, cache, cache.clone(), k,
                                                 k, cos, cos, filled, causal=True, **options)
        cu = torch.empty(3, dtype=torch.int32)
        rows = flash_attn.flash_attn_varlen_func(q.flatten(0, 1), cache, cache, cu, cu, 3, 48, block_table=table)
    assert out.shape == q.shape and rows.shape == (6, 4, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_captured(name):
    function, x = make("cuda", torch.bfloat16)[name], inputs("cuda", torch.bfloat16).detach()
    expected = function(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(x)
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out, expected)
    x.mul_(0.5)
    graph.replay()
    torch.testing.assert_close(out, function(x))


# ---- several processes


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = mg.nn.MultiheadAttention(32, 4, batch_first=True)
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.out(flash_attn.flash_attn_qkvpacked_func(self.qkv(x).unflatten(2, (3, 4, 8)),
                                                              causal=True).flatten(2))
        q = x.unflatten(2, (4, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)


def wrap_ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def wrap_fsdp(model):
    """Parameters in shards: attention's are gathered before its forward and its backward, the others' with the whole
    model's."""
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    fully_shard(model.attention, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_process(rank, folder, wrap):
    """Leaves the gradients of one step over half of the batch, summed over the processes, in folder/rank.pt."""
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = wrap(Block())
    x = torch.load(f"{folder}/x.pt")
    with mg.enable_sdpa():
        model(x[rank::2]).square().mean().backward()
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    torch.save(gradients, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # torch's threads that still wait for the interpreter's lock would abort an orderly exit


@pytest.mark.parametrize("wrap", [wrap_ddp, wrap_fsdp])
def test_two_processes(tmp_path, wrap):
    """Two processes get the gradients of one with the whole batch."""
    x = torch.randn(4, 13, 32)
    torch.save(x, tmp_path / "x.pt")
    torch.multiprocessing.spawn(train_process, (str(tmp_path), wrap), nprocs=2)
    torch.manual_seed(0)
    model = Block()
    model(x).square().mean().backward()
    for rank in range(2):
        gradients = torch.load(tmp_path / f"{rank}.pt")
        assert len(gradients) == len(list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


# ---- training


class Decoder(torch.nn.Module):
    """A small language model on packed sequences with grouped queries; `attend` is what is compared."""

    def __init__(self, attend, layers=2, width=64, heads=4, kv_heads=2):
        super().__init__()
        self.attend, self.split = attend, (heads, kv_heads, kv_heads)
        self.embedding, self.position = torch.nn.Embedding(32, width), torch.nn.Embedding(64, width)
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict(dict(
            norm=torch.nn.LayerNorm(width), qkv=torch.nn.Linear(width, (heads + 2 * kv_heads) * 16),
            out=torch.nn.Linear(heads * 16, width),
            mlp=torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 128),
                                    torch.nn.GELU(), torch.nn.Linear(128, width))))
            for _ in range(layers))

    def forward(self, tokens, positions, cu_seqlens):
        x = self.embedding(tokens) + self.position(positions)
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm"](x)).unflatten(1, (-1, 16)).split(self.split, 1)
            x = x + layer["out"](self.attend(q, k, v, cu_seqlens).flatten(1))
            x = x + layer["mlp"](x)
        return x @ self.embedding.weight.T


def attend_margay(q, k, v, cu_seqlens):
    return flash_attn.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 48, 48, causal=True)


def attend_torch(q, k, v, cu_seqlens):
    row = torch.arange(len(q))
    sequence = torch.searchsorted(cu_seqlens[1:], row.int(), right=True)
    mask = (sequence[:, None] == sequence) & (row[:, None] >= row)
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, 1)) / math.sqrt(16)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~mask, -math.inf).softmax(2), v.repeat_interleave(2, 1))


def batch_of_sequences(r, g):
    """Sequences that repeat their first half: what comes next is known in the second."""
    tokens, positions, counts = [], [], []
    while sum(counts) < 160:
        half = r.randrange(4, 24)
        first = torch.randint(32, (half,), generator=g)
        tokens.append(torch.cat((first, first)))
        positions.append(torch.arange(2 * half))
        counts.append(2 * half)
    return torch.cat(tokens), torch.cat(positions), lengths(*counts)


def test_training(seed):
    """200 steps: the loss follows that of PyTorch's attention, and falls."""
    curves = []
    for attend in (attend_torch, attend_margay):
        torch.manual_seed(seed)
        model, r, g = Decoder(attend), random.Random(seed), torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
        curve = []
        for _ in range(200):
            tokens, positions, cu_seqlens = batch_of_sequences(r, g)
            logits = model(tokens, positions, cu_seqlens)
            last = torch.zeros(len(tokens), dtype=torch.bool).index_fill(0, cu_seqlens[1:].long() - 1, True)
            loss = F.cross_entropy(logits[:-1][~last[:-1]], tokens[1:][~last[:-1]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(float(loss.detach()))
        curves.append(torch.tensor(curve))
    expected, found = curves
    assert found.isfinite().all() and found[-20:].mean() < 0.8 * found[:5].mean()
    assert (found[:50] - expected[:50]).abs().max() < 1e-3 and (found - expected).abs().max() < 0.05 * expected.max()
    assert abs(found[-20:].mean() - expected[-20:].mean()) < 0.01 * expected[-20:].mean()
