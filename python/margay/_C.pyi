"""The C module: one function per op on memory that the caller provides. Arguments are positional only.

Tensors are anything with DLPack: a C exchange table (`__dlpack_c_exchange_api__`) or `__dlpack__`. None is an absent optional tensor. A tensor
that requires a gradient is used as if detached: gradients are the business of `margay.attention` and `margay.matmul`. `stream` is a CUstream as
an integer; 0 is the current stream of the library that the tensors come from. `features` of attention: window's left and right (-1: no bound),
softcap, dropout_p, seed (0 to 2^64 - 1), sink [Hq], alibi_slopes [1 or B, Hq], cu_seqlens_q, cu_seqlens_k [B + 1] (then q, k, v have batch 1),
max_seqlen_q, max_seqlen_k.
"""

from collections.abc import Callable
from typing import Any, Protocol

class _Tensor(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

_Maybe = _Tensor | None
_Features = tuple[int, int, float, float, int, _Maybe, _Maybe, _Maybe, _Maybe, int, int]

def attention_fwd(
    out: _Tensor,
    lse: _Tensor | None,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    scale: float,
    causal: bool,
    stream: int = 0,
    workspace: _Tensor | None = None,
    features: _Features | None = None,
    /,
) -> None: ...
def attention_fwd_fp8(
    out: _Tensor,
    lse: _Tensor | None,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    workspace: _Tensor | None,
    q_descale: _Tensor | None,
    k_descale: _Tensor | None,
    v_descale: _Tensor | None,
    scale: float,
    causal: bool,
    stream: int = 0,
    /,
) -> None: ...
def attention_bwd_workspace(
    q: _Tensor, k: _Tensor, v: _Tensor, causal: bool, deterministic: bool, features: _Features | None = None, /
) -> int: ...
def attention_bwd(
    dq: _Tensor,
    dk: _Tensor,
    dv: _Tensor,
    dout: _Tensor,
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    out: _Tensor,
    lse: _Tensor,
    dlse: _Tensor | None,
    workspace: _Tensor,
    scale: float,
    causal: bool,
    deterministic: bool,
    stream: int = 0,
    features: _Features | None = None,
    /,
) -> None: ...
def attention_decode(
    out: _Tensor,
    lse: _Tensor | None,
    q: _Tensor,
    k_cache: _Tensor,
    v_cache: _Tensor,
    cache_seqlens: _Tensor | None,
    page_table: _Tensor | None,
    cache_batch_idx: _Tensor | None,
    sink: _Tensor | None,
    alibi_slopes: _Tensor | None,
    workspace: _Tensor | None,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    length: int,
    splits: int,
    stream: int = 0,
    /,
) -> None: ...
def attention_decode_workspace(
    q: _Tensor,
    k_cache: _Tensor,
    page_table: _Tensor | None,
    scale: float,
    causal: bool,
    left: int,
    right: int,
    softcap: float,
    length: int,
    splits: int,
    /,
) -> int: ...
def append_kv(
    k_cache: _Tensor,
    v_cache: _Tensor,
    k: _Tensor,
    v: _Tensor,
    cache_seqlens: _Tensor | None,
    page_table: _Tensor | None,
    cache_batch_idx: _Tensor | None,
    length: int,
    stream: int = 0,
    /,
) -> None: ...
# Rows of ops.def, written by tools/tables.py.
def scaled_add(out: _Tensor, a: _Tensor, b: _Tensor, scale: float = 1, stream: int = 0) -> None: ...
def scaled_add_bwd(da: _Tensor | None, db: _Tensor | None, dout: _Tensor, scale: float = 1, stream: int = 0) -> None: ...
def matmul(out: _Tensor, a: _Tensor, b: _Tensor, bias: _Tensor | None, activation: int = 0, stream: int = 0) -> None: ...
def linear_attention(out: _Tensor, final_state: _Tensor | None, cuts: _Tensor, decays: _Tensor, q: _Tensor, k: _Tensor, v: _Tensor, g: _Tensor | None, g_head: _Tensor | None, initial_state: _Tensor | None, cu_seqlens: _Tensor | None, scale: float = 0, stream: int = 0) -> None: ...
def linear_attention_bwd(dq: _Tensor, dk: _Tensor, dv: _Tensor, dg: _Tensor | None, dg_head: _Tensor | None, dinitial_state: _Tensor | None, states: _Tensor, dstates: _Tensor, starts: _Tensor, sums: _Tensor, dout: _Tensor, dfinal_state: _Tensor | None, q: _Tensor, k: _Tensor, v: _Tensor, g: _Tensor | None, g_head: _Tensor | None, initial_state: _Tensor | None, cu_seqlens: _Tensor | None, scale: float = 0, stream: int = 0) -> None: ...
def ssd(y: _Tensor, final_states: _Tensor | None, cuts: _Tensor, decays: _Tensor, x: _Tensor, dt: _Tensor, a: _Tensor, b: _Tensor, c: _Tensor, d: _Tensor | None, dt_bias: _Tensor | None, initial_states: _Tensor | None, seq_idx: _Tensor | None, cu_seqlens: _Tensor | None, dt_softplus: bool = 0, dt_min: float = 0, dt_max: float = 3.4e+38, stream: int = 0) -> None: ...
def ssd_bwd(dx: _Tensor, ddt: _Tensor, da: _Tensor, db: _Tensor, dc: _Tensor, dd: _Tensor | None, ddt_bias: _Tensor | None, dinitial_states: _Tensor | None, states: _Tensor, dstates: _Tensor, starts: _Tensor, sums: _Tensor, parts: _Tensor, dy: _Tensor, dfinal_states: _Tensor | None, x: _Tensor, dt: _Tensor, a: _Tensor, b: _Tensor, c: _Tensor, d: _Tensor | None, dt_bias: _Tensor | None, initial_states: _Tensor | None, seq_idx: _Tensor | None, cu_seqlens: _Tensor | None, dt_softplus: bool = 0, dt_min: float = 0, dt_max: float = 3.4e+38, stream: int = 0) -> None: ...
# End of the rows.
def ops() -> dict[str, list[dict[str, Any]]]: ...
def explain(op: str, **problem: str | int | bool) -> tuple[str | None, str]: ...
def dry_run(call: Callable[[], Any], /) -> tuple[str | None, str]: ...
def kernels() -> list[dict[str, Any]]: ...
def info() -> dict[str, Any]: ...
def preload(op: str | None, device: int, /) -> None: ...
def intercept(address: int, sms: int, /) -> None: ...
def prefer(row: str | None, /) -> None: ...
def set_num_threads(n: int, /) -> None: ...
def num_threads() -> int: ...
