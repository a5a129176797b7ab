"""FLA's delta rules on Margay's kernels. What stands in for FLA has its modules, names and arguments, one function that
asks its registry and three that do not, and recurrences in float64."""

import importlib
import math
import warnings

import pytest
import torch

import margay as mg
from delta_forms import hard
from fla_stand_in import REGISTRY, flat, stand_in

BODY = """
    import torch
    import fla
    from delta_forms import gates, normalised, recurrence, strength

    def compute(name, q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                state_v_first, cu_seqlens):
        fla.calls.append(name)
        turn = lambda s: s if s is None or not state_v_first else s.transpose(-1, -2)
        if use_gate_in_kernel:
            g = gates(g, torch.zeros(v.shape[2]) if A_log is None else A_log, dt_bias, lower_bound)
        if use_beta_sigmoid_in_kernel:
            beta = strength(beta, allow_neg_eigval)
        if use_qk_l2norm_in_kernel:
            q, k = normalised(q.float()), normalised(k.float())
        beta = torch.ones(v.shape[:3]) if beta is None else beta
        out, last = recurrence(q, k, v, g, beta, scale, turn(initial_state),
                               None if cu_seqlens is None else cu_seqlens.tolist())
        return out.to(v.dtype), turn(last).float() if output_final_state else None
"""
OPS = {
    **REGISTRY, "fla/compute.py": BODY,
    "fla/ops/__init__.py": """
        from .gated_delta_rule import chunk_gated_delta_rule, chunk_gdn, fused_recurrent_gated_delta_rule
        from .kda import chunk_kda, fused_recurrent_kda
        """,
    "fla/ops/gated_delta_rule/__init__.py": """
        from fla.compute import compute

        def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                                   use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False,
                                   allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
                                   chunk_indices=None, cp_context=None, **kwargs):
            if "head_first" in kwargs:
                raise DeprecationWarning("head_first")
            return compute("chunk_gated_delta_rule", q, k, v, g, beta, scale, initial_state, output_final_state,
                           use_qk_l2norm_in_kernel, kwargs.get("use_gate_in_kernel", False), kwargs.get("A_log"),
                           kwargs.get("dt_bias"), None, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
                           cu_seqlens)

        chunk_gdn = chunk_gated_delta_rule

        def fused_recurrent_gated_delta_rule(q, k, v, g=None, gk=None, gv=None, beta=None, scale=None,
                                             initial_state=None, output_final_state=False,
                                             use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None,
                                             dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
                                             state_v_first=False, cu_seqlens=None, **kwargs):
            return compute("fused_recurrent_gated_delta_rule", q, k, v, g if gk is None else gk, beta, scale,
                           initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log,
                           dt_bias, None, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens)
        """,
    "fla/ops/kda/__init__.py": """
        from fla.backends import dispatch
        from fla.compute import compute

        @dispatch
        def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                      use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
                      allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False,
                      return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
                      cp_context=None, use_graph=False, max_num_seqs=None, **kwargs):
            return compute("chunk_kda", q, k, v, g, beta, scale, initial_state, output_final_state,
                           use_qk_l2norm_in_kernel, use_gate_in_kernel, kwargs.get("A_log"), kwargs.get("dt_bias"),
                           lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens)

        def fused_recurrent_kda(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None,
                                output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
                                use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None,
                                state_v_first=False, cu_seqlens=None, **kwargs):
            return compute("fused_recurrent_kda", q, k, v, g, beta, scale, initial_state, output_final_state,
                           use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, lower_bound,
                           use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens)
        """,
    "fla/layers/__init__.py": "",
    "fla/layers/gated_deltanet.py": "from fla.ops.gated_delta_rule import chunk_gated_delta_rule",
}


@pytest.fixture
def fla(tmp_path, monkeypatch, one_thread):
    yield from stand_in(OPS, tmp_path, monkeypatch)


def made(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def problem(steps=70, channels=False, rows=2, b=2, d=40, dv=24):
    q, k, v, g, beta, state, *_ = hard("mild", 1, b, steps, 2, 4, d, dv, channels=channels, dtype=torch.float32,
                                       rows=rows)
    return q, k, v, g, beta, state


def raw(channels, steps=70):
    """Arguments of gates in the kernel."""
    q, k, v, _, _, state = problem(steps)
    g = made(2, steps, 4, *(40,) * channels, seed=5)
    options = dict(A_log=made(4, seed=6), dt_bias=made(160 if channels else 4, seed=7), use_gate_in_kernel=True,
                   use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
                   initial_state=state.mT.contiguous(), output_final_state=True, state_v_first=True)
    return (3 * q, 2 * k, v, g, made(2, steps, 4, seed=8)), options


def calls():
    found = {}
    for op, channels in (("gated_delta_rule", False), ("kda", True)):
        for form, more in (("chunk", {"chunk_size": 32}), ("fused_recurrent", {})):
            package = "gated_delta_rule" if not channels else "kda"
            name = f"{package}.{form}_{op}"
            *tensors, state = problem(channels=channels)
            q, k, v, g, beta = tensors
            given = dict(g=g, beta=beta)
            found[name] = (q, k, v), given | dict(initial_state=state, output_final_state=True) | more
            found[name + ", no state"] = (q, k, v), given | dict(scale=0.3)
            found[name + ", a step"] = (q[:, :1], k[:, :1], v[:, :1]), dict(
                g=g[:, :1], beta=beta[:, :1], initial_state=state, output_final_state=True)
            tensors, options = raw(channels)
            found[name + ", raw"] = tensors[:3], dict(g=tensors[3], beta=tensors[4]) | options
            tensors, options = raw(channels, 3)
            found[name + ", raw steps"] = tensors[:3], dict(g=tensors[3], beta=tensors[4]) | options
            *tensors, state = problem(channels=channels, rows=3, b=1)
            found[name + ", packed"] = tuple(tensors[:3]), dict(
                g=tensors[3], beta=tensors[4], initial_state=state, output_final_state=True,
                cu_seqlens=torch.tensor([0, 5, 5, 70]))
            *tensors, state = problem(channels=channels, dv=300)
            found[name + ", wide"] = tuple(tensors[:3]), dict(g=tensors[3], beta=tensors[4], initial_state=state,
                                                             output_final_state=True)
            if channels:
                tensors, options = raw(True)
                options |= dict(lower_bound=-5.0)
                found[name + ", bounded"] = tensors[:3], dict(g=tensors[3], beta=tensors[4]) | options
                options = options | dict(A_log=None)
                found[name + ", bounded, no A_log"] = tensors[:3], dict(g=tensors[3], beta=tensors[4]) | options
    q, k, v, g, beta, state = problem(channels=True)
    name = "gated_delta_rule.fused_recurrent_gated_delta_rule"
    found[name + ", of channels"] = (q, k, v), dict(gk=g, beta=beta, output_final_state=True)
    found[name + ", nothing"] = (q, k, v), dict(output_final_state=True)
    return found


CALLS = calls()


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_flas(fla, name):
    module, function = name.split(",")[0].split(".")
    tensors, options = CALLS[name]
    fresh = lambda t: (t.detach().clone().requires_grad_(" step" not in name)  # noqa: E731
                       if isinstance(t, torch.Tensor) and t.is_floating_point() else t)
    found = []
    for switched in (False, True):
        switch = mg.integrations.fla.register() if switched else None
        call = getattr(importlib.import_module(f"fla.ops.{module}"), function)
        given, named = [fresh(t) for t in tensors], {key: fresh(t) for key, t in options.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("error", mg.FallbackWarning)
            results = flat(call(*given, **named))
        leaves = [t for t in (*given, *named.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
        grads = ()
        if leaves:
            douts = [made(*t.shape, seed=9 + i).to(t.dtype) for i, t in enumerate(results)]
            grads = torch.autograd.grad(results, leaves, douts)
        found.append([*results, *grads])
        assert (function in fla.calls) is not switched
        if named.get("initial_state") is not None:
            assert torch.equal(named["initial_state"], options["initial_state"])
        fla.calls.clear()
        if switched:
            switch.disable()
    for theirs, ours in zip(*found, strict=True):
        assert theirs.shape == ours.shape and theirs.dtype == ours.dtype
        assert (ours.double() - theirs.double()).norm() <= 2e-5 * theirs.double().norm() + 1e-9


def test_names_are_replaced_everywhere_and_come_back(fla):
    import fla.layers.gated_deltanet as layers
    import fla.ops as ops

    before = ops.chunk_gated_delta_rule, ops.fused_recurrent_kda, ops.chunk_kda
    q, k, v, g, beta, _ = problem()
    with mg.integrations.fla.register():
        assert ops.chunk_gdn is ops.chunk_gated_delta_rule is layers.chunk_gated_delta_rule is not before[0]
        assert ops.fused_recurrent_kda is not before[1] and ops.chunk_kda is before[2]         # asks the registry
        ops.chunk_gdn(q, k, v, g, beta)
    assert not fla.calls and ops.chunk_gdn is layers.chunk_gated_delta_rule is before[0]
    ops.chunk_gdn(q, k, v, g, beta)
    assert fla.calls == ["chunk_gated_delta_rule"]


Q, K, V, G, BETA, STATE = problem()
OF_CHANNELS = problem(channels=True)[3]
REFUSED = {
    "dtype float64 on cpu": ("chunk_gated_delta_rule", (Q.double(), K.double(), V.double(), G, BETA), {}),
    "q, k and v of several dtypes": ("chunk_gated_delta_rule", (Q, K, V.half(), G, BETA), {}),
    "q, k and v that differ in batch or steps": ("chunk_kda", (Q, K, V[:1], OF_CHANNELS, BETA), {}),
    "heads of v that are no multiple of those of q": ("chunk_kda", (Q, K, V[:, :, :3], OF_CHANNELS, BETA), {}),
    "a head dim of q and k over 128": ("fused_recurrent_gated_delta_rule", problem(3, d=129)[:3], {}),
    "a scale that is not positive, or that float32 cannot hold": ("chunk_kda", (Q, K, V, OF_CHANNELS, BETA),
                                                                  dict(scale=-1.0)),
    "decays of another shape": ("chunk_kda", (Q, K, V, OF_CHANNELS[:1], BETA), {}),
    "betas of dtype int64": ("chunk_kda", (Q, K, V, OF_CHANNELS, BETA.long()), {}),
    "a lower bound that is not negative, or that float32 cannot hold": (
        "fused_recurrent_kda", (Q, K, V, OF_CHANNELS, BETA), dict(use_gate_in_kernel=True, lower_bound=-math.inf)),
    "betas of another shape": ("chunk_gated_delta_rule", (Q, K, V, G, BETA[:1]), {}),
    "an initial state of another shape": ("chunk_gated_delta_rule", (Q, K, V, G, BETA),
                                          dict(initial_state=STATE, state_v_first=True)),
    "decays of the values' columns": ("fused_recurrent_gated_delta_rule", (Q, K, V), dict(gv=V)),
    "decays of heads and of channels together": ("fused_recurrent_gated_delta_rule", (Q, K, V, G),
                                                 dict(gk=OF_CHANNELS)),
    "sequences over several devices": ("chunk_gated_delta_rule", (Q, K, V, G, BETA), dict(cp_context=object())),
    "allow_neg_eigval without a sigmoid of beta": ("chunk_gated_delta_rule", (Q, K, V, G, BETA),
                                                   dict(allow_neg_eigval=True)),
    "a gate without A_log": ("fused_recurrent_kda", (Q, K, V, OF_CHANNELS, BETA), dict(use_gate_in_kernel=True)),
    "return_intermediate_states": ("chunk_kda", (Q, K, V, OF_CHANNELS, BETA), dict(return_intermediate_states=True)),
    "other arguments": ("chunk_gated_delta_rule", (Q, K, V, G, BETA), dict(transpose_state_layout=True)),
    "a chunk_size that FLA does not take": ("chunk_kda", (Q, K, V, OF_CHANNELS, BETA), dict(chunk_size=16)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_has_no_kernel_is_flas(fla, reason):
    name, arguments, options = REFUSED[reason]
    with mg.integrations.fla.register(), pytest.warns(mg.FallbackWarning) as warned:
        ops = importlib.import_module("fla.ops")
        try:
            getattr(ops, name)(*arguments, **options)
        except (RuntimeError, IndexError, AttributeError, ZeroDivisionError):    # of what stands in for FLA
            pass
    assert str(warned[0].message) == f"{name}: {reason}; computed by FLA" and warned[0].filename == __file__
    assert fla.calls == [name]


def test_flas_own_refusals_stay_its_own(fla):
    with mg.integrations.fla.register(), warnings.catch_warnings():
        warnings.simplefilter("ignore", mg.FallbackWarning)
        from fla.ops import chunk_gated_delta_rule

        with pytest.raises(DeprecationWarning, match="head_first"):
            chunk_gated_delta_rule(Q, K, V, G, BETA, head_first=True)
        with pytest.raises(TypeError):
            chunk_gated_delta_rule(Q)
