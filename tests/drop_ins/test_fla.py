"""FLA's functions on Margay's kernels. What stands in for FLA here has its modules, names and arguments, a registry
like its own, and recurrences in float64."""

import importlib
import sys
import warnings

import pytest
import torch

import margay as mg
from fla_stand_in import REGISTRY, flat, stand_in

MODULES = {
    **REGISTRY,
    "fla/ops/__init__.py": """
        from .linear_attn import chunk_linear_attn
        from .retention import chunk_retention
        from .simple_gla import chunk_simple_gla, fused_chunk_simple_gla
        """,
    "fla/ops/simple_gla/__init__.py": """
        from .chunk import chunk_simple_gla
        from .fused_chunk import fused_chunk_simple_gla
        """,
    "fla/ops/simple_gla/chunk.py": """
        import torch
        import fla

        def recurrence(q, k, v, g, scale, state):
            q, k, v, g = (t.double() for t in (q, k, v, g))
            out = []
            for t in range(q.shape[1]):
                state = g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None, :]
                out.append(scale * (q[:, t, :, None] @ state)[:, :, 0])
            return torch.stack(out, 1) if out else v, state

        def chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
                             state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs):
            fla.calls.append("chunk_simple_gla")
            if "head_first" in kwargs:
                raise DeprecationWarning("head_first")
            steps, turn = q.shape[1], lambda s: s.transpose(-1, -2) if state_v_first else s
            g = q.new_zeros(q.shape[:3]) if g is None else g
            g = g if g_gamma is None else g + g_gamma
            starts = [0, steps] if cu_seqlens is None else cu_seqlens.tolist()
            outs, states = [], []
            for i, (begin, end) in enumerate(zip(starts, starts[1:])):
                part = slice(begin, end)
                state = q.new_zeros(len(q), q.shape[2], q.shape[3], v.shape[3])
                if initial_state is not None:
                    state = turn(initial_state if cu_seqlens is None else initial_state[i:i + 1])
                out, state = recurrence(q[:, part], k[:, part], v[:, part], g[:, part].expand(len(q), -1, -1),
                                        q.shape[3] ** -0.5 if scale is None else scale, state.double())
                outs.append(out)
                states.append(turn(state))
            return torch.cat(outs, 1).to(q.dtype), torch.cat(states).float() if output_final_state else None
        """,
    "fla/ops/simple_gla/fused_chunk.py": """
        import fla
        from fla.backends import dispatch
        from .chunk import chunk_simple_gla

        @dispatch
        def fused_chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
                                   output_final_state=False, cu_seqlens=None):
            fla.calls.append("fused_chunk_simple_gla")
            return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state,
                                    cu_seqlens=cu_seqlens)
        """,
    "fla/ops/retention/__init__.py": """
        import torch
        from fla.ops.simple_gla import chunk_simple_gla

        def chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
                            **kwargs):
            g = (1 - 2.0 ** (-5.0 - torch.arange(q.shape[2]))).log()
            return chunk_simple_gla(q, k, v, None, g, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)
        """,
    "fla/ops/lightning_attn/__init__.py": """
        import torch
        from fla.ops.simple_gla import chunk_simple_gla

        def chunk_lightning_attn(q, k, v, layer_idx, num_layers, scale=None, initial_state=None,
                                 output_final_state=False, cu_seqlens=None, **kwargs):
            g = -(8 / q.shape[2] * (1 - layer_idx / num_layers)) * torch.arange(q.shape[2]).float()
            return chunk_simple_gla(q, k, v, None, g, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)
        """,
    "fla/ops/linear_attn/__init__.py": """
        from fla.ops.simple_gla import chunk_simple_gla

        def chunk_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True,
                              cu_seqlens=None):
            state, z = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
            scale = q.shape[3] ** -0.5 if scale is None else scale
            out, state = chunk_simple_gla(q, k, v, None, None, scale, state, output_final_state, cu_seqlens=cu_seqlens)
            if not normalize:
                return out, state
            sums = k.float().cumsum(1) + (0 if z is None else z)
            out = out / ((scale * q * sums).sum(-1, keepdim=True) + 1e-10)
            return out.to(q.dtype), (state, sums[:, -1:])
        """,
    "fla/layers/__init__.py": "",
    "fla/layers/simple_gla.py": """
        from fla.ops.simple_gla import chunk_simple_gla

        def layer(q, k, v):
            return chunk_simple_gla(q, k, v, state_v_first=True, output_final_state=True)
        """,
}


@pytest.fixture
def fla(tmp_path, monkeypatch):
    yield from stand_in(MODULES, tmp_path, monkeypatch)


def made(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = (made(2, 70, 3, 40, seed=i) for i in range(3))
G, STATE = -made(2, 70, 3, seed=3).abs(), made(2, 3, 40, 40, seed=4)
STARTS, PACKED_STATE = torch.tensor([0, 5, 5, 70]), made(3, 3, 40, 40, seed=5)
PACKED = [t[:1] for t in (Q, K, V)]
CALLS = {
    "simple_gla.chunk_simple_gla, step": ((Q, K, V, G), dict(scale=0.3, initial_state=STATE, output_final_state=True)),
    "simple_gla.chunk_simple_gla, head": ((Q, K, V), dict(g_gamma=G[0, 0], chunk_size=32, output_final_state=True)),
    "simple_gla.chunk_simple_gla, turned": ((Q, K, V[..., :30], G), dict(
        initial_state=STATE[..., :30].mT, output_final_state=True, state_v_first=True)),
    "simple_gla.chunk_simple_gla, packed": ((*PACKED, G[:1]), dict(
        cu_seqlens=STARTS, initial_state=PACKED_STATE, output_final_state=True)),
    "simple_gla.chunk_simple_gla, wide": ((Q, K, made(2, 70, 3, 300), G), dict(
        initial_state=made(2, 3, 40, 300), output_final_state=True)),
    "simple_gla.fused_chunk_simple_gla": ((Q, K, V, G), dict(initial_state=STATE, output_final_state=True)),
    "retention.chunk_retention": ((Q, K, V), dict(initial_state=STATE.half(), output_final_state=True)),
    "lightning_attn.chunk_lightning_attn": ((Q, K, V, 1, 4), dict(output_final_state=True)),
    "linear_attn.chunk_linear_attn": ((Q, K, V), dict(initial_state=STATE, output_final_state=True, normalize=False)),
    "linear_attn.chunk_linear_attn, normalized": ((Q.abs(), K.abs(), V), dict(
        initial_state=(STATE, K[:, :1].abs()), output_final_state=True)),
    "linear_attn.chunk_linear_attn, its sums": ((Q.abs(), K.abs(), V), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_flas(fla, name):
    path, arguments = name.split(",")[0], CALLS[name]
    found = []
    for switched in (False, True):
        switch = mg.integrations.fla.register() if switched else None
        module, function = path.split(".")
        call = getattr(importlib.import_module(f"fla.ops.{module}"), function)
        tensors, options = arguments
        tensors = [t.detach().clone().requires_grad_() if isinstance(t, torch.Tensor) else t for t in tensors]
        with warnings.catch_warnings():
            warnings.simplefilter("error", mg.FallbackWarning)
            results = flat(call(*tensors, **options))
        leaves = [t for t in tensors if isinstance(t, torch.Tensor)]
        douts = [made(*t.shape, seed=9 + i).to(t.dtype) for i, t in enumerate(results)]
        found.append([*results, *torch.autograd.grad(results, leaves, douts)])
        assert ("chunk_simple_gla" in fla.calls) is not switched
        fla.calls.clear()
        if switched:
            switch.disable()
    for theirs, ours in zip(*found, strict=True):
        assert theirs.shape == ours.shape and theirs.dtype == ours.dtype
        limit = 1e-3 if theirs.dtype == torch.float16 else 1e-5
        assert (ours.double() - theirs.double()).norm() <= limit * theirs.double().norm()


def test_names_are_replaced_everywhere_and_come_back(fla):
    import fla.layers.simple_gla as layers
    import fla.ops as ops
    from fla.ops.simple_gla import chunk

    everything = lambda: {(name, attribute): value for name, module in sys.modules.items()  # noqa: E731
                          if name.split(".")[0] == "fla" for attribute, value in vars(module).items()
                          if callable(value)}
    before, original = everything(), ops.chunk_simple_gla
    outer, inner = mg.integrations.fla.register(), mg.integrations.fla.register()
    ours = ops.chunk_simple_gla
    assert ours is not original and ours.__name__ == "chunk_simple_gla"
    assert layers.chunk_simple_gla is chunk.chunk_simple_gla is ops.simple_gla.chunk_simple_gla is ours
    assert ops.fused_chunk_simple_gla is before["fla.ops", "fused_chunk_simple_gla"]        # asks the registry
    layers.layer(Q, K, V)
    inner.disable()
    ops.fused_chunk_simple_gla(Q, K, V)
    layers.layer(Q, K, V)
    assert fla.calls == []
    sys.modules.pop("fla.layers.simple_gla")
    outer.disable()
    outer.disable()
    layers = importlib.import_module("fla.layers.simple_gla")
    assert all(everything()[key] is value for key, value in before.items() if key[0] != "fla.layers.simple_gla")
    layers.layer(Q, K, V)
    ops.fused_chunk_simple_gla(Q, K, V)
    assert fla.calls == ["chunk_simple_gla", "fused_chunk_simple_gla", "chunk_simple_gla"]
    with mg.integrations.fla.register():
        ops.fused_chunk_simple_gla(Q, K, V)
        layers.layer(Q, K, V)
    assert len(fla.calls) == 3
    for _ in range(2):
        mg.integrations.fla.register()
    mg.integrations.fla.unregister()
    assert all(everything()[key] is value for key, value in before.items() if key[0] != "fla.layers.simple_gla")


REFUSED = {
    "dtype float64 on cpu": ((Q.double(), K.double(), V.double()), {}),
    "q, k and v of several dtypes": ((Q, K, V.half()), {}),
    "q, k and v that differ in batch, steps or heads": ((Q, K, V[:1]), {}),
    "a head dim of q and k over 256": ((made(1, 3, 1, 257),) * 2 + (made(1, 3, 1, 2),), {}),
    "a scale that is not positive, or that float32 cannot hold": ((Q, K, V), dict(scale=-1.0)),
    "decays of heads and of steps together": ((Q, K, V, G, G[0, 0]), {}),
    "decays that are neither of heads nor of steps of heads": ((Q, K, V, G[:1]), {}),
    "an initial state of another shape": ((Q, K, V), dict(initial_state=STATE[:1])),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_has_no_kernel_is_flas(fla, reason):
    from fla.ops.simple_gla import fused_chunk_simple_gla

    arguments, options = REFUSED[reason]
    with mg.integrations.fla.register():
        from fla.ops import chunk_simple_gla

        for function in (chunk_simple_gla, fused_chunk_simple_gla):
            with pytest.warns(mg.FallbackWarning) as warned:
                try:
                    function(*arguments, **options)
                except RuntimeError:                     # of shapes, from what stands in for FLA
                    pass
            message = f"{function.__name__}: {reason}; computed by FLA"
            assert str(warned[0].message) == message and warned[0].filename == __file__
    assert fla.calls[0] == "chunk_simple_gla" and "fused_chunk_simple_gla" in fla.calls


def test_flas_own_refusals_stay_its_own(fla):
    with mg.integrations.fla.register(), warnings.catch_warnings():
        warnings.simplefilter("ignore", mg.FallbackWarning)
        from fla.ops import chunk_simple_gla

        with pytest.raises(DeprecationWarning, match="head_first"):
            chunk_simple_gla(Q, K, V, head_first=True)
        with pytest.raises(TypeError):
            chunk_simple_gla(Q)


def test_a_registry_that_is_switched_off(fla, monkeypatch):
    """As its variable says: then these functions are replaced by name as well."""
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    with mg.integrations.fla.register():
        importlib.import_module("fla.ops").fused_chunk_simple_gla(Q, K, V)
    assert fla.calls == []


def test_without_fla(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ModuleNotFoundError):
        mg.integrations.fla.register()
