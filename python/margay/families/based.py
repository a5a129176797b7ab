"""Based: linear attention whose weights are a second-order Taylor polynomial."""

from margay._shared import (check_rank, checked_scale, functions, is_torch, number, of_row, remembered, rows_library,
                            shape, starts_of_all)

_PART, _SUM_ROWS, _SUM_COLS = 160, 34, 32       # as csrc/based/based.h


def based(q, k, v, *, scale=None, normalize=True, initial_state=None, output_final_state=False, cu_seqlens=None,
          eps=1e-6):
    """out_i = sum of w_ij v_j / (sum of w_ij + eps) over j <= i, with w = 1 + s + s^2 / 2 and s_ij = scale q_i . k_j.

    q, k [B, T, H, K], v [B, T, H, V], out [B, T, H, V]; 1 <= K <= 32, 1 <= V <= 128. bfloat16 or float16, on the CPU
    also float32. PyTorch tensors are differentiable, but not cu_seqlens; NumPy arrays give NumPy arrays. K up to 16 is
    one pass over the sequence, more are four.

    scale: 1 / sqrt(K) if None.
    normalize: False leaves the division out.
    initial_state: float32 [B, H, F, V + 1], F = (K + 1) (K + 2) / 2; zero if None. With k' = (1, k), it is the sum of
        k'_a k'_b (v, 1) over the steps before the first, for a <= b: the rows are the upper triangle of k' k'^T, row by
        row.
    output_final_state: return (out, the state behind the last step).
    cu_seqlens: integers [sequences + 1]. B is 1, and sequence i has steps cu_seqlens[i] to cu_seqlens[i + 1] - 1. The
        states are then those of the sequences, [sequences, H, F, V + 1].
    """
    torch_ = is_torch("based", "q", q)
    eps = number("based", "eps", eps)
    if not 0.0 <= eps <= 3.4e38:
        raise ValueError(f"based: eps is {eps:g}, expected a finite number that is not negative")
    if cu_seqlens is not None:
        cu_seqlens = starts_of_all("based", cu_seqlens, q)
    features = sums = None
    if initial_state is not None:
        check_rank("based", "q", q, 4, "[batch, steps, heads, K]")
        check_rank("based", "v", v, 4, "[batch, steps, heads, V]")
        rows = len(cu_seqlens) - 1 if cu_seqlens is not None else q.shape[0]
        wanted = [rows, q.shape[2], (q.shape[3] + 1) * (q.shape[3] + 2) // 2, v.shape[3] + 1]
        if shape(initial_state) != wanted:
            raise ValueError(f"based: initial_state has shape {shape(initial_state)}, expected {wanted}")
        initial_state = rows_library(torch_).as_float32("based", "initial_state", initial_state)
        features, sums = _to_kernel(initial_state, q.shape[3])
    run = functions.get("based") or of_row("based")
    out, features, sums = run(q, k, v, features, sums, cu_seqlens, checked_scale("based", scale), bool(normalize), eps,
                              (bool(output_final_state),) * 2)
    return (out, _from_kernel(features, sums, q.shape[3])) if output_final_state else out


# ---- where the kernels have what (csrc/based/based_features.h)


@remembered
def _places(k):
    """Of the upper triangle's elements: the column among all parts' features, and the place in the sums and in their
    transpose."""
    columns, sums, turned = [], [], []
    for a, b in [(a, b) for a in range(k + 1) for b in range(a, k + 1)]:
        if b == 0:
            columns.append(136)
            sums.append((_SUM_ROWS - 1) * _SUM_COLS)
            turned.append(sums[-1])
            continue
        i, j = a - 1, b - 1
        if a == 0:
            columns.append(_PART * (j // 16) + 144 + j % 16)
            sums.append((_SUM_ROWS - 2) * _SUM_COLS + j)
            turned.append(sums[-1])
            continue
        columns.append(_column(i, j))
        sums.append(i * _SUM_COLS + j)
        turned.append(j * _SUM_COLS + i)
    return columns, sums, turned


def _column(i, j):
    if i // 16 != j // 16:
        distance = (j - i) % 16
        return _PART * (2 + distance // 8) + 16 * (distance % 8) + i
    part, i, j = i // 16, i % 16, j % 16
    distance = j - i
    if distance > 8:
        distance, i = 16 - distance, j
    return _PART * part + 16 * distance + i


@remembered
def _sources(k):
    """The inverse: of the parts' features and of the sums, the row of the triangle, or its length where there is
    none."""
    columns, sums, turned = _places(k)
    parts = 4 if k > 16 else 1
    features, products = [len(columns)] * (_PART * parts), [len(columns)] * (_SUM_ROWS * _SUM_COLS)
    for row, (column, place, other) in enumerate(zip(columns, sums, turned)):
        features[column] = products[place] = products[other] = row
    return features, products


def _take(t, places, dim):
    if hasattr(t, "index_select"):
        import torch

        return t.index_select(dim, torch.tensor(places, device=t.device))
    import numpy as np

    return np.take(t, places, dim)


def _padded(t):
    """A row of zeros behind the triangle."""
    if hasattr(t, "new_zeros"):
        import torch

        return torch.nn.functional.pad(t, (0, 0, 0, 1))
    import numpy as np

    return np.pad(t, [(0, 0)] * 2 + [(0, 1), (0, 0)])


def _dense(t):
    if hasattr(t, "contiguous"):
        return t.contiguous()
    import numpy as np

    return np.ascontiguousarray(t)


def _to_kernel(state, k):
    features, products = _sources(k)
    state = _padded(state)
    rows, heads, v = state.shape[0], state.shape[1], state.shape[3] - 1
    of_v = _take(state[..., :v], features, 2).reshape(rows, heads, len(features) // _PART, _PART, v).swapaxes(3, 4)
    return _dense(of_v), _dense(_take(state[..., v], products, 2).reshape(rows, heads, _SUM_ROWS, _SUM_COLS))


def _from_kernel(features, sums, k):
    columns, places, turned = _places(k)
    rows, heads, parts, v = features.shape[:4]
    of_v = _take(features.swapaxes(3, 4).reshape(rows, heads, parts * _PART, v), columns, 2)
    flat = sums.reshape(rows, heads, _SUM_ROWS * _SUM_COLS)
    of_one = 0.5 * (_take(flat, places, 2) + _take(flat, turned, 2))     # both, as their gradients want it
    if hasattr(of_v, "new_zeros"):
        import torch

        return torch.cat((of_v, of_one[..., None]), 3)
    import numpy as np

    return np.concatenate((of_v, of_one[..., None]), 3)
