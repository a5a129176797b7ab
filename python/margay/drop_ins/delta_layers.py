"""Layers of the delta rules: Gated DeltaNet and Kimi delta attention, with the weights of the models that have them."""

import math

import torch
import torch.nn.functional as F

import margay
from margay._shared import as_int32
from margay.drop_ins import delta_rules
from margay.drop_ins.causal_conv1d import causal_conv1d_varlen_states
from margay.mamba import RMSNormGated

MOST_STEPS = 8               # that are computed as steps of generation
_RAW = dict(use_gate=True, use_qk_l2norm=True, use_beta_sigmoid=True)


class _DeltaLayer(torch.nn.Module):
    """What the two have in common: a short convolution of q, k and v, the delta rule, a gated norm, a projection.

    A subclass has _project(x), which returns (q, k and v before the convolution, {name: tensor} of the rule's other
    arguments), and _finish(out, x)."""

    def _size(self, name, hidden_size, num_heads, head_dim, num_v_heads, expand_v, conv_size):
        heads_v, dim_v = num_heads if num_v_heads is None else num_v_heads, int(head_dim * expand_v)
        for what, number in (("hidden_size", hidden_size), ("num_heads", num_heads), ("head_dim", head_dim)):
            if number < 1:
                raise ValueError(f"{name}: {what} is {number}, expected at least 1")
        if heads_v < 1 or heads_v % num_heads:
            raise ValueError(f"{name}: num_v_heads is {heads_v}, expected a multiple of num_heads, which is "
                             f"{num_heads}")
        if dim_v < 1 or not math.isclose(head_dim * expand_v, dim_v, rel_tol=1e-5):
            raise ValueError(f"{name}: expand_v is {expand_v}, expected one that makes a whole number of head_dim, "
                             f"which is {head_dim}")
        if head_dim > delta_rules.MOST_K:
            raise NotImplementedError(f"{name}: head_dim is {head_dim}, kernels exist up to {delta_rules.MOST_K}")
        if not 2 <= conv_size <= 4:
            raise ValueError(f"{name}: conv_size is {conv_size}, expected 2 to 4")
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.num_v_heads, self.head_v_dim, self.conv_size = heads_v, dim_v, conv_size
        self.key_dim, self.value_dim = num_heads * head_dim, heads_v * dim_v

    def _convolution(self, conv_bias, place):
        width = 2 * self.key_dim + self.value_dim
        return torch.nn.Conv1d(width, width, self.conv_size, groups=width, padding=self.conv_size - 1, bias=conv_bias,
                               **place)

    def forward(self, hidden_states, cu_seqlens=None, inference_params=None):
        """hidden_states [batch, steps, hidden_size] to the same shape.

        cu_seqlens: starts of packed sequences of batch 1, which see nothing of each other. inference_params:
        seqlen_offset and key_value_memory_dict, as `Mamba2` has them; at offset 0 the states behind the last step, or
        with cu_seqlens those behind each sequence, are put there; later the layer continues from them as `step` does.
        """
        x, states = hidden_states, None
        packed = None if cu_seqlens is None else as_int32(type(self).__name__, "cu_seqlens", cu_seqlens)
        if inference_params is not None:
            states = self._states(inference_params, len(x) if packed is None else len(packed) - 1)
        if states is not None and inference_params.seqlen_offset > 0:
            return self.step(x, *states)[0]
        qkv, options = self._project(x)
        out, last = self.mix(qkv, options, packed)
        if states is not None:
            with torch.no_grad():
                self._remember(states, qkv, last, packed)
        return self._finish(out, x)

    def mix(self, qkv, options, cu_seqlens=None, initial_states=(None, None)):
        """The convolutions and the rule, for a subclass to do something before or instead of them: out [batch, steps,
        num_v_heads, head_v_dim] and the last states. qkv: what is convolved, one tensor or three; options: the rule's
        other arguments. initial_states: of the convolution [batch, conv_size - 1, channels], of the rule."""
        before, state = initial_states
        weight, bias, at = self.conv1d.weight[:, 0], self.conv1d.bias, 0
        convolved = []
        for x in qkv:
            part = slice(at, at := at + x.shape[-1])
            convolved.append(margay.causal_conv1d(
                x, weight[part], None if bias is None else bias[part], activation="silu",
                initial_states=None if before is None else before[..., part], cu_seqlens=cu_seqlens))
        return delta_rules.in_slices(self._rule, *self._heads(convolved), state, **options, cu_seqlens=cu_seqlens)

    @torch.no_grad()
    def step(self, hidden_states, conv_state, recurrent_state):
        """A few more steps of each sequence, [batch, steps, hidden_size], mostly one. Returns the result and the
        states, which are updated in place. Not differentiable."""
        x = hidden_states
        qkv, options = self._project(x)
        whole = _joined(qkv).to(conv_state.dtype)
        if x.shape[1] > MOST_STEPS:
            before = conv_state.transpose(1, 2)[:, 1:].to(whole.dtype)
            out, last = self.mix((whole,), options, None, (before, recurrent_state))
            recurrent_state.copy_(last)
            conv_state.copy_(whole[:, -self.conv_size:].transpose(1, 2))
        else:
            weight, bias = self.conv1d.weight[:, 0], self.conv1d.bias
            whole = margay.causal_conv1d_step(whole, conv_state.transpose(1, 2), weight, bias, activation="silu")
            out = self._steps(recurrent_state, *self._heads((whole.to(qkv[0].dtype),)), **options)
        return self._finish(out, x), conv_state, recurrent_state

    def allocate_inference_cache(self, batch_size, max_seqlen=0, dtype=None, **kwargs):
        """States of `step` before a first one, zeros: of the convolution [batch, channels, conv_size], as its weights
        or of dtype, and of the rule [batch, num_v_heads, head_dim, head_v_dim], float32."""
        weight = self.conv1d.weight
        conv_state = weight.new_zeros(batch_size, self.conv_size, len(weight), dtype=dtype).transpose(1, 2)
        return conv_state, weight.new_zeros(batch_size, self.num_v_heads, self.head_dim, self.head_v_dim,
                                            dtype=torch.float32)

    def _states(self, inference_params, batch):
        if self.layer_idx is None:
            raise ValueError(f"{type(self).__name__}: inference_params is given and layer_idx is None, expected the "
                             "layer's number")
        known = inference_params.key_value_memory_dict
        if self.layer_idx not in known:
            known[self.layer_idx] = self.allocate_inference_cache(batch)
        return known[self.layer_idx]

    def _remember(self, states, qkv, last, cu_seqlens):
        conv_state, recurrent_state = states
        size, at = self.conv_size, 0
        for x in qkv:
            part = conv_state[:, at:(at := at + x.shape[-1])]
            if cu_seqlens is None:                   # zeros in front of what is shorter than the state
                part.copy_(F.pad(x[:, -size:].transpose(1, 2), (max(0, size - x.shape[1]), 0)))
            else:
                part.copy_(causal_conv1d_varlen_states(x[0], cu_seqlens, size))
        recurrent_state.copy_(last)

    def _heads(self, convolved):
        if len(convolved) == 1:
            convolved = convolved[0].split((self.key_dim, self.key_dim, self.value_dim), dim=-1)
        dims = self.head_dim, self.head_dim, self.head_v_dim
        return [t.unflatten(-1, (-1, dim)) for t, dim in zip(convolved, dims)]

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        self._rename(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self):
        return (f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, head_dim={self.head_dim}, "
                f"num_v_heads={self.num_v_heads}, head_v_dim={self.head_v_dim}")


class GatedDeltaNet(_DeltaLayer):
    """The layer of Qwen3-Next, Qwen3.5, OLMo-Hybrid and of flash-linear-attention's models: a short convolution, the
    gated delta rule, a gated norm. hidden_states [batch, steps, hidden_size] to the same shape.

    num_heads heads of queries and keys with head_dim columns, 1 to 128, num_v_heads (as many if None) heads of values
    with expand_v * head_dim. use_gate: silu of a projection multiplies the normed heads. allow_neg_eigval: beta is up
    to 2.
    conv_size: steps that the convolution sees. layer_idx: this layer's place in inference_params.

    The state dict has the names of Qwen3.5's layer. Those of Qwen3-Next's, OLMo-Hybrid's and FLA's can be loaded too,
    and `state_dict_as` makes them.
    """

    __module__ = "margay.nn"      # which pickles name

    def __init__(self, hidden_size, num_heads=16, head_dim=128, num_v_heads=None, expand_v=1, *, use_gate=True,
                 allow_neg_eigval=False, conv_size=4, conv_bias=False, norm_eps=1e-6, layer_idx=None, device=None,
                 dtype=None):
        super().__init__()
        self._size("GatedDeltaNet", hidden_size, num_heads, head_dim, num_v_heads, expand_v, conv_size)
        self.use_gate, self.allow_neg_eigval, self.norm_eps = use_gate, allow_neg_eigval, norm_eps
        self.layer_idx = layer_idx
        place = dict(device=device, dtype=dtype)
        linear = lambda inside, outside: torch.nn.Linear(inside, outside, bias=False, **place)  # noqa: E731
        self.in_proj_qkv = linear(hidden_size, 2 * self.key_dim + self.value_dim)
        if use_gate:
            self.in_proj_z = linear(hidden_size, self.value_dim)
        self.in_proj_b, self.in_proj_a = (linear(hidden_size, self.num_v_heads) for _ in range(2))
        self.conv1d = self._convolution(conv_bias, place)
        self.A_log = _rates((self.num_v_heads,), place)
        self.dt_bias = _biases(self.num_v_heads, place)
        self.norm = RMSNormGated(self.head_v_dim, norm_eps, norm_before_gate=True, **place)
        self.out_proj = linear(self.value_dim, hidden_size)

    def _project(self, x):
        return (self.in_proj_qkv(x),), dict(g=self.in_proj_a(x), beta=self.in_proj_b(x), A_log=self.A_log,
                                            dt_bias=self.dt_bias)

    def _finish(self, out, x):
        z = self.in_proj_z(x).unflatten(-1, (-1, self.head_v_dim)) if self.use_gate else None
        return self.out_proj(self.norm(out, z).flatten(2))

    def _rule(self, *tensors, **options):
        return margay.gated_delta_rule(*tensors, **options, allow_neg_eigval=self.allow_neg_eigval, **_RAW)

    def _steps(self, *tensors, **options):
        return margay.gated_delta_rule_step(*tensors, **options, allow_neg_eigval=self.allow_neg_eigval, **_RAW)

    def _rename(self, state, prefix):
        """Names and orders of other layers to this one's."""
        for name in _OF_FLA_GDN:
            _move(state, prefix, name, _OF_FLA_GDN[name])
        _join(state, prefix, "in_proj_qkv.weight", ("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        _join_convolutions(state, prefix)
        groups = self.num_v_heads // self.num_heads
        by_head = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z", 2 * self.head_dim + groups * self.head_v_dim),
                   "in_proj_ba": ("in_proj_b", "in_proj_a", groups)}
        for name, (first, second, rows) in by_head.items():
            both = state.pop(f"{prefix}{name}.weight", None)
            if both is not None:                       # Qwen3-Next: the rows of a key head and of what belongs to it
                a, b = both.unflatten(0, (self.num_heads, -1)).split((rows, both.shape[0] // self.num_heads - rows), 1)
                if name == "in_proj_qkvz":
                    a = torch.cat([t.flatten(0, 1) for t in a.split((self.head_dim, self.head_dim,
                                                                     groups * self.head_v_dim), 1)])
                state[f"{prefix}{first}.weight"] = a if a.ndim == 2 else a.flatten(0, 1)
                state[f"{prefix}{second}.weight"] = b.flatten(0, 1)

    def state_dict_as(self, layer):
        """The weights with the names and in the order of another layer: "qwen3_5", "qwen3_next", "olmo_hybrid" or
        "fla"."""
        if layer not in ("qwen3_5", "qwen3_next", "olmo_hybrid", "fla"):
            raise ValueError(f"GatedDeltaNet: layer is {layer!r}, expected 'qwen3_5', 'qwen3_next', 'olmo_hybrid' or "
                             "'fla'")
        state = dict(self.state_dict())
        sizes = self.key_dim, self.key_dim, self.value_dim
        if layer == "qwen3_next":
            if not self.use_gate:
                raise ValueError("GatedDeltaNet: use_gate is False, expected True (Qwen3-Next's layer has a gate)")
            by_head = lambda t: t.unflatten(0, (self.num_heads, -1))  # noqa: E731
            qkvz = [*state.pop("in_proj_qkv.weight").split(sizes), state.pop("in_proj_z.weight")]
            state["in_proj_qkvz.weight"] = torch.cat([by_head(t) for t in qkvz], 1).flatten(0, 1)
            ba = state.pop("in_proj_b.weight"), state.pop("in_proj_a.weight")
            state["in_proj_ba.weight"] = torch.cat([by_head(t) for t in ba], 1).flatten(0, 1)
        if layer in ("olmo_hybrid", "fla"):
            _split(state, "in_proj_qkv.weight", ("q_proj.weight", "k_proj.weight", "v_proj.weight"), sizes)
            _split_convolutions(state, sizes)
            for name, ours in _OF_FLA_GDN.items():
                _move(state, "", ours, name)
        return state


class KimiDeltaAttention(_DeltaLayer):
    """The layer of Kimi Linear and of flash-linear-attention's models: a short convolution, the delta rule with a gate
    for each channel of the keys, a norm gated by a sigmoid. hidden_states [batch, steps, hidden_size] to the same
    shape.

    num_heads, head_dim, num_v_heads, expand_v, allow_neg_eigval, conv_size and layer_idx as for `GatedDeltaNet`.
    lower_bound: log decays are lower_bound sigmoid(e^A_log (g + dt_bias)), else -e^A_log softplus(g + dt_bias).
    gate_rank: columns between the two projections of a gate, those of a value head if None; 0: one projection, as
    Bailing's layer has it. gate_bias: a bias in the output gate, as FLA's layer has it.

    The state dict has the names of Kimi Linear's layer in transformers. Those of its first release, of GLM's and
    Bailing's layers and of FLA's can be loaded too, and `state_dict_as` makes FLA's.
    """

    __module__ = "margay.nn"

    def __init__(self, hidden_size, num_heads=16, head_dim=128, num_v_heads=None, expand_v=1, *, lower_bound=None,
                 allow_neg_eigval=False, gate_rank=None, gate_bias=False, conv_size=4, conv_bias=False, norm_eps=1e-5,
                 layer_idx=None, device=None, dtype=None):
        super().__init__()
        self._size("KimiDeltaAttention", hidden_size, num_heads, head_dim, num_v_heads, expand_v, conv_size)
        if lower_bound is not None and not (lower_bound < 0 and math.isfinite(lower_bound)):
            raise ValueError(f"KimiDeltaAttention: lower_bound is {lower_bound}, expected a negative number")
        self.lower_bound, self.allow_neg_eigval, self.norm_eps = lower_bound, allow_neg_eigval, norm_eps
        self.gate_rank, self.layer_idx = self.head_v_dim if gate_rank is None else gate_rank, layer_idx
        place = dict(device=device, dtype=dtype)
        linear = lambda inside, outside, bias=False: torch.nn.Linear(inside, outside, bias, **place)  # noqa: E731
        self.q_proj, self.k_proj = linear(hidden_size, self.key_dim), linear(hidden_size, self.key_dim)
        self.v_proj = linear(hidden_size, self.value_dim)
        self.conv1d = self._convolution(conv_bias, place)
        self.forget_gate = torch.nn.Module()                # under which the models have these
        width = self.num_v_heads * head_dim
        if self.gate_rank:
            self.forget_gate.f_a_proj = linear(hidden_size, self.gate_rank)
            self.forget_gate.f_b_proj = linear(self.gate_rank, width)
        else:
            self.forget_gate.f_proj = linear(hidden_size, width)
        self.forget_gate.dt_bias = _biases(width, place)
        self.forget_gate.A_log = _rates((1, 1, self.num_v_heads, 1), place, lower_bound is not None)
        self.b_proj = linear(hidden_size, self.num_v_heads)
        if self.gate_rank:
            self.g_a_proj = linear(hidden_size, self.gate_rank)
            self.g_b_proj = linear(self.gate_rank, self.value_dim, gate_bias)
        else:
            self.g_proj = linear(hidden_size, self.value_dim, gate_bias)
        self.o_norm = torch.nn.RMSNorm(self.head_v_dim, norm_eps, **place)
        self.o_proj = linear(self.value_dim, hidden_size)

    def _project(self, x):
        gate = self.forget_gate
        raw = gate.f_b_proj(gate.f_a_proj(x)) if self.gate_rank else gate.f_proj(x)
        options = dict(g=raw.unflatten(-1, (-1, self.head_dim)), beta=self.b_proj(x), A_log=gate.A_log.flatten(),
                       dt_bias=gate.dt_bias.unflatten(0, (-1, self.head_dim)))
        return (self.q_proj(x), self.k_proj(x), self.v_proj(x)), options

    def _finish(self, out, x):
        gate = (self.g_b_proj(self.g_a_proj(x)) if self.gate_rank else self.g_proj(x)).unflatten(-1, out.shape[2:])
        normed = F.rms_norm(out.float(), out.shape[3:], self.o_norm.weight.float(), self.norm_eps)
        return self.o_proj((normed * torch.sigmoid(gate.float())).to(out.dtype).flatten(2))

    def _rule(self, *tensors, **options):
        return margay.kda(*tensors, **options, lower_bound=self.lower_bound, allow_neg_eigval=self.allow_neg_eigval,
                          **_RAW)

    def _steps(self, *tensors, **options):
        return margay.kda_step(*tensors, **options, lower_bound=self.lower_bound,
                               allow_neg_eigval=self.allow_neg_eigval, **_RAW)

    def _rename(self, state, prefix):
        for name in _OF_FLA_KDA | _OF_FIRST_KIMI:
            _move(state, prefix, name, (_OF_FLA_KDA | _OF_FIRST_KIMI)[name])
        _join_convolutions(state, prefix)
        rates = state.get(f"{prefix}forget_gate.A_log")
        if rates is not None and rates.numel() == self.num_v_heads:
            state[f"{prefix}forget_gate.A_log"] = rates.reshape(1, 1, -1, 1)

    def state_dict_as(self, layer):
        """The weights with the names and in the order of another layer: "kimi_linear" or "fla"."""
        if layer not in ("kimi_linear", "fla"):
            raise ValueError(f"KimiDeltaAttention: layer is {layer!r}, expected 'kimi_linear' or 'fla'")
        state = dict(self.state_dict())
        if layer == "fla":
            if not self.gate_rank:
                raise ValueError("KimiDeltaAttention: gate_rank is 0, expected at least 1 (FLA's layer has two "
                                 "projections for a gate)")
            _split_convolutions(state, (self.key_dim, self.key_dim, self.value_dim))
            for name, ours in _OF_FLA_KDA.items():
                _move(state, "", ours, name)
            state["A_log"] = state["A_log"].flatten()
        return state


def _rates(shape, place, bounded=False):
    """A_log: rates of 1 to 16, or where a gate is bounded 1."""
    rates = torch.zeros(shape, **place) if bounded else torch.empty(shape, **place).uniform_(1, 16).log_()
    return _undecayed(rates)


def _biases(size, place):
    """Softplus makes 0.001 to 0.1 of them, evenly in the logarithm."""
    dt = torch.exp(torch.rand(size, device=place["device"]) * math.log(100) + math.log(0.001)).clamp(min=1e-4)
    return _undecayed((dt + torch.log(-torch.expm1(-dt))).to(place["dtype"]))


def _undecayed(t):
    parameter = torch.nn.Parameter(t)
    parameter._no_weight_decay = True                # which training programs look for
    return parameter


# ---- state dicts

_OF_FLA_GDN = {"a_proj.weight": "in_proj_a.weight", "b_proj.weight": "in_proj_b.weight",
               "g_proj.weight": "in_proj_z.weight", "o_norm.weight": "norm.weight", "o_proj.weight": "out_proj.weight"}
_OF_FLA_KDA = {"f_proj.0.weight": "forget_gate.f_a_proj.weight", "f_proj.1.weight": "forget_gate.f_b_proj.weight",
               "g_proj.0.weight": "g_a_proj.weight", "g_proj.1.weight": "g_b_proj.weight",
               "g_proj.1.bias": "g_b_proj.bias", "A_log": "forget_gate.A_log", "dt_bias": "forget_gate.dt_bias"}
_OF_FIRST_KIMI = {"f_a_proj.weight": "forget_gate.f_a_proj.weight", "f_b_proj.weight": "forget_gate.f_b_proj.weight",
                  "f_proj.weight": "forget_gate.f_proj.weight"}
_CONVOLUTIONS = "q_conv1d", "k_conv1d", "v_conv1d"


def _move(state, prefix, old, new):
    if prefix + old in state:
        state[prefix + new] = state.pop(prefix + old)


def _join(state, prefix, name, parts):
    if all(prefix + part in state for part in parts):
        state[prefix + name] = torch.cat([state.pop(prefix + part) for part in parts])


def _join_convolutions(state, prefix):
    for kind in ("weight", "bias"):
        _join(state, prefix, f"conv1d.{kind}", [f"{name}.{kind}" for name in _CONVOLUTIONS])


def _split(state, name, parts, sizes):
    if name in state:
        state.update(zip(parts, state.pop(name).split(sizes)))


def _split_convolutions(state, sizes):
    for kind in ("weight", "bias"):
        _split(state, f"conv1d.{kind}", [f"{name}.{kind}" for name in _CONVOLUTIONS], sizes)


def _joined(parts):
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
