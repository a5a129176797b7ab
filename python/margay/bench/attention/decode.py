"""One query a sequence over its cache, plain and paged, against PyTorch's flash attention of the same caches (GPU).

One query for each of B sequences, 32 query heads, 4 key heads (or 32: MHA), D = 128, bfloat16. Memory bounds it: keys
and values are read once. `of memory` is their bytes over the time, relative to 4.35 TB/s.
`pages of n`: in random order; PyTorch reads the unpaged cache.
`graph`: as generation runs. A CUDA graph holds several layers' attention, each with caches of its own, which together
are many times the L2. The time is the graph's over its layers, and includes what two kernels cost each other.
The L2 is emptied by reading, not by writing: lines that were written would have to leave it while the caches come in.
"""
import functools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import margay
from margay.bench.harness import FLUSH_BYTES, HIDE_CYCLES, Case, CpuTimer, GpuTimer, Problem, run_family

HEADS_PAGES = ((4, 0), (4, 64), (4, 16), (32, 0))        # key heads, rows of a page; 0: no pages
BATCHES = (1, 8, 32, 128)
CONTEXTS = (1024, 8192, 32768, 131072)
Q_HEADS, D = 32, 128
MOST_BYTES = 36 << 30        # of keys and values, and their copy in pages
GRAPH_BYTES = 2 << 30        # of a graph's layers together


def sdpa(q, k, v):
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        return scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                            enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)


def layer(batch, context, k_heads, page, seed=0, device="cuda"):
    """(ours, torch's) of one layer."""
    torch.manual_seed(seed)
    q = torch.randn(batch, 1, Q_HEADS, D, device=device).bfloat16()
    k, v = (torch.empty(batch, context, k_heads, D, device=device, dtype=torch.bfloat16).normal_() for _ in range(2))
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    caches, table = (k, v), None
    if page:
        table = torch.randperm(batch * context // page, device=device).view(batch, -1)
        pages = [t.view(-1, page, k_heads, D) for t in (k, v)]
        caches = [torch.empty_like(t).index_copy_(0, table.flatten(), t) for t in pages]
        table = table.int()
    return functools.partial(margay.attention_decode, q, *caches, cache_seqlens=lengths,
                             page_table=table), functools.partial(sdpa, q, k, v)


def captured(calls):
    """One call that makes them all, as a CUDA graph."""
    for call in calls:
        call()                                     # libraries load, workspaces are planned
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = tuple(call() for call in calls)

    def replay(_=calls):                           # whose tensors the graph reads, but does not keep
        graph.replay()
        return results
    return replay


def build(batch, context, k_heads, page, layers, device="cuda"):
    names = "margay", "torch"
    calls = zip(*(layer(batch, context, k_heads, page, i, device) for i in range(max(1, layers))))
    runners = {name: captured(each) if layers else each[0] for name, each in zip(names, calls)}
    flops, size = 4 * batch * Q_HEADS * context * D, 4 * batch * context * k_heads * D
    return Problem(runners, 1e-2, flops * max(1, layers), size * max(1, layers))


def layers_of(size):
    """Layers of a graph whose layers read `size` bytes each: so many that its own launch hardly counts.

    0, no graph, where one call takes long enough alone, or the caches would stay in the L2.
    """
    return max(4, min(32, GRAPH_BYTES // size)) if 16 << 20 <= size <= 600 << 20 else 0


def cases(batches=BATCHES, contexts=CONTEXTS, heads_pages=HEADS_PAGES, device="cuda"):
    for graph in (False, True) if device == "cuda" else (False,):
        for k_heads, page in heads_pages:
            for batch in batches:
                for context in contexts:
                    size = 4 * batch * context * k_heads * D
                    layers = layers_of(size) if graph else 0
                    if size * (1 + bool(page)) > MOST_BYTES or (graph and not layers):
                        continue
                    group = f"{Q_HEADS}/{k_heads} heads" + (f", pages of {page}" if page
                                                            else "") + (", graph" if graph else "")
                    fields = {"group": group, "batch": batch, "n": context, "k_heads": k_heads, "page": page,
                              "mask": f"B={batch}", "bytes": size * max(1, layers)}
                    if graph:
                        fields["layers"] = layers
                    call = functools.partial(build, batch, context, k_heads, page, layers, device)
                    yield Case(f"decode {group} B={batch} N={context}", fields, call)


class ReadingTimer(GpuTimer):
    def __init__(self):
        super().__init__()
        self.lines, self.sum = torch.zeros(FLUSH_BYTES // 4, device="cuda"), torch.empty((), device="cuda")

    def once(self, call):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.sum(self.lines, 0, out=self.sum)
        torch.cuda._sleep(HIDE_CYCLES)
        start.record()
        call()
        end.record()
        return start, end


def timer_for(device):
    return ReadingTimer() if device == "cuda" else CpuTimer()


def run(options, arguments):
    with torch.no_grad():
        return run_family("decode", cases(), ReadingTimer(), options)
