"""Rotary embedding (Su et al., RoFormer, 2021): pairs of columns of q and k, turned by angles of their steps."""

from margay._shared import as_int32, check_rank, functions, integer, is_torch, mismatch, of_row


def rotary(q, k, cos, sin, *, interleaved=False, positions=None, offsets=None, inplace=False):
    """(x, y) of each pair becomes (x cos - y sin, y cos + x sin). Returns (q, k), or q alone where k is None.

    q [B, T, H, D], k [B, T, HK, D] or None, in one launch, of any strides with a contiguous last dimension. bfloat16 or
    float16, on the CPU also float32; arithmetic in float32. D is at most 1024. PyTorch tensors are differentiable in q
    and k, not in cos and sin. NumPy arrays give NumPy arrays.

    cos, sin: [T', A], or [B, T', A] of each sample, float32 or as q; A at most D / 2. Columns from 2 A on are copied.
    interleaved: a pair is columns 2i and 2i + 1 (GPT-J), else i and i + A (GPT-NeoX, Llama).
    positions: integers [T] or [B, T], the row of cos and sin for each step; None: step t has row t.
    offsets: added to the rows: an integer, or integers [B] (flash-attn's seqlen_offsets).
    inplace: q and k are written and returned. With gradients on, autograd sees a write in place.
    A row that cos and sin do not have reads as zeros; without positions and integers [B], `ValueError`.
    """
    torch_ = is_torch("rotary", "q", q)
    if k is not None:
        is_torch("rotary", "k", k)
    check_rank("rotary", "q", q, 4, "[B, T, H, D]")
    cos, sin = table("rotary", "cos", cos), table("rotary", "sin", sin)
    offset, offsets = offset_of("rotary", offsets)
    positions = rows_of_positions("rotary", positions, q, torch_)
    rest = cos, sin, positions, offsets, offset, bool(interleaved)
    if inplace and torch_:
        from margay.families.rotary_torch import in_place

        in_place(q, k, *rest)
        return q if k is None else (q, k)
    given = q, q[:, :, :0] if k is None else k, *rest
    if inplace:
        from margay._C import rotary_in_place

        rotary_in_place(*given)
        return q if k is None else (q, k)
    out = (functions.get("rotary") or of_row("rotary"))(*given)
    return out[0] if k is None else out


def table(op, name, t):
    """cos or sin as [B or 1, T', A]."""
    is_torch(op, name, t)
    if t.ndim not in (2, 3):
        raise ValueError(f"{op}: {name} has {t.ndim} dimensions, expected 2 [T', A] or 3 [B, T', A]")
    return t[None] if t.ndim == 2 else t


def offset_of(op, offsets):
    """(that of all samples, that of each or None)"""
    if offsets is None:
        return 0, None
    if hasattr(offsets, "ndim") and offsets.ndim:
        return 0, as_int32(op, "offsets", offsets)
    offset = integer(op, "offsets", offsets)
    if not -2**31 <= offset < 2**31:
        raise ValueError(f"{op}: offsets is {offset}, expected an integer of 32 bits")
    return offset, None


def rows_of_positions(op, positions, q, torch_):
    """Positions as [B, T]."""
    if positions is None:
        return None
    positions = as_int32(op, "positions", positions)
    if positions.ndim != 1:
        return positions
    if positions.shape[0] != q.shape[1]:
        mismatch(op, "positions", positions, "size", 0, "q", q[0])
    positions = positions[None]
    return positions.expand(q.shape[0], -1) if torch_ else positions.repeat(q.shape[0], 0)


def _explained(op, library, named, given):
    from margay._explain import explain_row

    forms, shown = dict(given), dict(named)
    for name in ("cos", "sin"):
        forms[name] = table(op, name, given[name])
    return explain_row(op, library, shown, {name: t for name, t in forms.items() if name not in
                                            ("positions", "offsets", "interleaved")})


EXPLAINED = {"rotary": _explained}
