"""Layers of margay.nn around linear attention, with the state dicts of the layers that models were trained with."""

import copy

import torch

from margay.families.based import based
from margay.families.hedgehog import hedgehog
from margay.families.linear_attention import linear_attention, linear_attention_step


def _check_heads(layer, heads, kv_heads):
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{layer}: num_heads is {heads}, expected a multiple of the heads of keys and values, which "
                         f"are {kv_heads}")


def _divided(layer, name, n, heads):
    if n < 1 or n % heads:
        raise ValueError(f"{layer}: {name} is {n}, expected a multiple of num_heads, which is {heads}")
    return n // heads


def _shared_by(t, heads):
    """Keys or values of fewer heads, for all."""
    return t if t.shape[2] == heads else t.repeat_interleave(heads // t.shape[2], 2)


class ElementwiseProduct(torch.nn.Module):
    """Two linear maps of a head, multiplied."""

    def __init__(self, head_dim, device=None, dtype=None):
        super().__init__()
        self.layer1, self.layer2 = (torch.nn.Linear(head_dim, head_dim, device=device, dtype=dtype) for _ in range(2))

    def forward(self, x):
        return self.layer1(x) * self.layer2(x)


class PositiveElu(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.elu(x) + 1


_FEATURES = {"elementwise_product": ElementwiseProduct, "elu": lambda *_: PositiveElu(),
             "relu": lambda *_: torch.nn.ReLU(), "identity": lambda *_: torch.nn.Identity()}
_GATES, _NORMS = (None, "head", "step"), ("rmsnorm", "identity")


class LinearAttention(torch.nn.Module):
    """Attention without a softmax, [batch, steps, hidden_size] to the same shape, causal. Without a gate it has the
    options and the state dict of fla.layers.LinearAttention.

    num_kv_heads: heads of keys and values, each shared by num_heads / num_kv_heads query heads; num_heads if None.
    expand_k, expand_v: columns of all heads of queries and of values, in hidden sizes.
    feature_map: of queries and keys: "elementwise_product", "elu" (+ 1), "relu", "identity", or a module, which keys
        get a copy of unless tie_feature_map_qk.
    gate: how the state decays. None: not. "head": by 1 - 2^(-5 - h) a step, h the head (retention). "step": by
        sigmoid(gk_proj(x))^(1 / 16) (simple GLA).
    norm_q, norm_k: divide features by their sum. do_feature_map_norm: divide by the sum of the weights.
    output_norm: "rmsnorm" of each head, or "identity".
    """

    __module__ = "margay.nn"      # which pickles name

    def __init__(self, hidden_size=1024, expand_k=1.0, expand_v=1.0, num_heads=8, num_kv_heads=None,
                 feature_map="elementwise_product", tie_feature_map_qk=False, output_norm="rmsnorm", norm_q=False,
                 norm_k=False, do_feature_map_norm=False, elementwise_affine=True, norm_eps=1e-5, *, gate=None,
                 device=None, dtype=None):
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads("LinearAttention", num_heads, kv_heads)
        for name, value, known in (("gate", gate, _GATES), ("output_norm", output_norm, _NORMS)):
            if value not in known:
                raise ValueError(f"LinearAttention: {name} is {value!r}, expected one of "
                                 f"{', '.join(map(repr, known))}")
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, kv_heads
        self.head_k_dim = _divided("LinearAttention", "hidden_size * expand_k", int(hidden_size * expand_k), num_heads)
        self.head_v_dim = _divided("LinearAttention", "hidden_size * expand_v", int(hidden_size * expand_v), num_heads)
        self.norm_q, self.norm_k, self.normalize, self.gate = norm_q, norm_k, do_feature_map_norm, gate
        place = dict(device=device, dtype=dtype)
        self.feature_map_q = self._features(feature_map, place)
        self.feature_map_k = self.feature_map_q if tie_feature_map_qk else (
            copy.deepcopy(feature_map) if isinstance(feature_map, torch.nn.Module) else
            self._features(feature_map, place))
        linear = lambda n, m, bias=False: torch.nn.Linear(n, m, bias, **place)  # noqa: E731
        self.q_proj = linear(hidden_size, num_heads * self.head_k_dim)
        self.k_proj = linear(hidden_size, kv_heads * self.head_k_dim)
        self.v_proj = linear(hidden_size, kv_heads * self.head_v_dim)
        if gate == "step":
            self.gk_proj = linear(hidden_size, num_heads, True)
        if gate == "head":
            decay = torch.log1p(-2.0 ** (-5 - torch.arange(num_heads, device=device, dtype=torch.float32)))
            self.register_buffer("decay", decay, persistent=False)
        self.norm = torch.nn.Identity()
        if output_norm == "rmsnorm":
            self.norm = torch.nn.RMSNorm(self.head_v_dim, norm_eps, elementwise_affine, **place)
        self.o_proj = linear(num_heads * self.head_v_dim, hidden_size)

    def _features(self, feature_map, place):
        if isinstance(feature_map, torch.nn.Module):
            return feature_map
        if feature_map not in _FEATURES:
            raise ValueError(f"LinearAttention: feature_map is {feature_map!r}, expected a module or one of "
                             f"{', '.join(map(repr, _FEATURES))}")
        return _FEATURES[feature_map](self.head_k_dim, *place.values())

    def forward(self, x, *, initial_state=None, output_final_state=False, cu_seqlens=None):
        """The states and cu_seqlens are those of `margay.linear_attention`; with output_final_state the result is
        (out, state)."""
        out = linear_attention(*self._inputs(x), self._decay(x), normalize=self.normalize, initial_state=initial_state,
                               output_final_state=output_final_state, cu_seqlens=cu_seqlens)
        out, state = out if output_final_state else (out, None)
        out = self.o_proj(self.norm(out).flatten(-2))
        return (out, state) if output_final_state else out

    @torch.no_grad()
    def step(self, x, state):
        """A few more steps of each sequence, [batch, steps, hidden_size], mostly one. `state`, as `forward` returns it,
        is updated in place. Not differentiable."""
        (q, k, v), g = self._inputs(x), self._decay(x)
        if not self.normalize:
            out = linear_attention_step(state, q, k, v, g)
        else:
            state, z = state
            out = linear_attention_step(state, q, k, v, g)
            sums = linear_attention_step(z[..., None], q, k, torch.ones_like(v[..., :1]), g)
            out = (out.float() / (sums.float() + 1e-10)).to(out.dtype)
        return self.o_proj(self.norm(out).flatten(-2))

    def _inputs(self, x):
        q = self.feature_map_q(self.q_proj(x).unflatten(-1, (-1, self.head_k_dim)))
        k = self.feature_map_k(self.k_proj(x).unflatten(-1, (-1, self.head_k_dim)))
        q = q / (q.sum(-1, True) + 1e-4) if self.norm_q else q
        k = k / (k.sum(-1, True) + 1e-4) if self.norm_k else k
        v = self.v_proj(x).unflatten(-1, (-1, self.head_v_dim))
        return q, _shared_by(k, self.num_heads), _shared_by(v, self.num_heads)

    def _decay(self, x):
        if self.gate == "step":
            return torch.nn.functional.logsigmoid(self.gk_proj(x).float()) / 16
        return self.decay if self.gate == "head" else None

    def extra_repr(self):
        return (f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
                f"head_k_dim={self.head_k_dim}, head_v_dim={self.head_v_dim}, gate={self.gate!r}")


class Based(torch.nn.Module):
    """Based's linear attention, [batch, steps, hidden_size] to the same shape, causal, with the state dict of
    fla.layers.BasedLinearAttention.

    feature_dim: columns of a head's queries and keys, at most 32. num_key_value_heads: heads of keys and values, each
    shared by num_heads / num_key_value_heads query heads; num_heads if None. eps: added to the sum of the weights.
    """

    __module__ = "margay.nn"

    def __init__(self, hidden_size, feature_dim=16, num_key_value_heads=None, num_heads=12, eps=1e-12, *, device=None,
                 dtype=None):
        super().__init__()
        kv_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        _check_heads("Based", num_heads, kv_heads)
        self.hidden_size, self.feature_dim, self.eps = hidden_size, feature_dim, eps
        self.num_heads, self.num_key_value_heads = num_heads, kv_heads
        self.head_dim = _divided("Based", "hidden_size", hidden_size, num_heads)
        linear = lambda n, m: torch.nn.Linear(n, m, False, device, dtype)  # noqa: E731
        self.q_proj = linear(hidden_size, num_heads * feature_dim)
        self.k_proj = linear(hidden_size, kv_heads * feature_dim)
        self.v_proj = linear(hidden_size, kv_heads * self.head_dim)
        self.o_proj = linear(num_heads * self.head_dim, hidden_size)

    def forward(self, x, *, initial_state=None, output_final_state=False, cu_seqlens=None):
        """The states and cu_seqlens are those of `margay.based`; with output_final_state the result is (out, state).
        Generation goes on from the state, a step or more at a time."""
        q = self.q_proj(x).unflatten(-1, (-1, self.feature_dim))
        k = _shared_by(self.k_proj(x).unflatten(-1, (-1, self.feature_dim)), self.num_heads)
        v = _shared_by(self.v_proj(x).unflatten(-1, (-1, self.head_dim)), self.num_heads)
        out = based(q, k, v, eps=self.eps, initial_state=initial_state, output_final_state=output_final_state,
                    cu_seqlens=cu_seqlens)
        out, state = out if output_final_state else (out, None)
        out = self.o_proj(out.flatten(-2))
        return (out, state) if output_final_state else out

    def extra_repr(self):
        return (f"hidden_size={self.hidden_size}, feature_dim={self.feature_dim}, num_heads={self.num_heads}, "
                f"num_key_value_heads={self.num_key_value_heads}")


class FeatureMap(torch.nn.Module):
    """A matrix for each head, [heads, head dim, feature dim], where LoLCATs' state dict has it."""

    def __init__(self, heads, head_dim, feature_dim, device=None, dtype=None):
        super().__init__()
        self.mlp = torch.nn.Module()
        eye = torch.eye(head_dim, feature_dim, device=device, dtype=dtype)
        self.mlp.layer = torch.nn.Parameter(eye.repeat(heads, 1, 1))


class Hedgehog(torch.nn.Module):
    """LoLCATs' attention, softmax in a window and linear in front of it, [batch, steps, hidden_size] to the same shape,
    causal, with the state dict of LoLCATs' layers. It sees whole sequences: there is no cache for generation.

    num_kv_heads: heads of keys and values, each shared by num_heads / num_kv_heads query heads; num_heads if None.
    head_dim: hidden_size / num_heads if None. feature_dim: columns of the learned maps, which begin as the identity.
    window_size, sliding: `window` and `sliding` of `margay.hedgehog`.
    init_window_factor: of the window's factors, which go through a sigmoid. The linear part's are 1, or with
        affine_attention_factors 1 less the window's.
    """

    __module__ = "margay.nn"

    def __init__(self, hidden_size, num_heads, num_kv_heads=None, head_dim=None, feature_dim=64, *, window_size=64,
                 sliding=False, affine_attention_factors=False, init_window_factor=0.0, bias=False, device=None,
                 dtype=None):
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads("Hedgehog", num_heads, kv_heads)
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, kv_heads
        self.head_dim = _divided("Hedgehog", "hidden_size", hidden_size, num_heads) if head_dim is None else head_dim
        self.window_size, self.sliding = window_size, sliding
        self.affine_attention_factors = affine_attention_factors
        linear = lambda n, m, bias: torch.nn.Linear(n, m, bias, device, dtype)  # noqa: E731
        self.q_proj = linear(hidden_size, num_heads * self.head_dim, bias)
        self.k_proj = linear(hidden_size, kv_heads * self.head_dim, bias)
        self.v_proj = linear(hidden_size, kv_heads * self.head_dim, bias)
        self.o_proj = linear(num_heads * self.head_dim, hidden_size, False)
        self.feature_map_q = FeatureMap(num_heads, self.head_dim, feature_dim, device, dtype)
        self.feature_map_k = FeatureMap(num_heads, self.head_dim, feature_dim, device, dtype)
        factors = torch.full((1, num_heads, 1, 1), float(init_window_factor), device=device, dtype=dtype)
        self.window_factors = torch.nn.Parameter(factors)

    def forward(self, x, *, cu_seqlens=None):
        """cu_seqlens: starts of packed sequences of batch 1, which see nothing of each other."""
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.attend(q, k, v, cu_seqlens).flatten(-2))

    def attend(self, q, k, v, cu_seqlens=None):
        """The attention of the layer, of q [batch, steps, num_heads, head_dim], k and v of num_kv_heads, for a subclass
        to do something before it, such as rotary embeddings."""
        k, v = _shared_by(k, self.num_heads), _shared_by(v, self.num_heads)
        factor = torch.sigmoid(self.window_factors.float().flatten())
        other = 1 - factor if self.affine_attention_factors else torch.ones_like(factor)
        return hedgehog(q, k, v, self.feature_map_q.mlp.layer, self.feature_map_k.mlp.layer, factor, other,
                        window=self.window_size, sliding=self.sliding, cu_seqlens=cu_seqlens)

    def extra_repr(self):
        return (f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
                f"head_dim={self.head_dim}, window_size={self.window_size}, sliding={self.sliding}")
