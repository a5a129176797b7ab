"""The layer mamba_ssm.Mamba2 on Margay's kernels."""

import math

import torch

from margay.drop_ins.causal_conv1d import causal_conv1d_varlen_states
from margay.families.causal_conv1d.causal_conv1d import causal_conv1d, causal_conv1d_step
from margay.families.ssd import ssd_step
from margay.mamba import RMSNormGated, int32, join_mlp, scan, split_projection


class Mamba2(torch.nn.Module):
    """mamba_ssm.Mamba2 on Margay's kernels: the same constructor, state dict, arguments and results. x [batch, steps,
    d_model] to the same shape.

    expand * d_model columns inside, of which d_ssm (all if None) go through the convolution and the scan, in heads of
    headdim columns with states of d_state, and the others through a gated MLP. ngroups: groups of heads that share B
    and C. D_has_hdim: D is [d_ssm], else one number for a head. rmsnorm: a gated norm behind the scan; else the gate
    alone. conv_init: bound of the convolution's first weights. layer_idx: this layer's place in inference_params.
    chunk_size, use_mem_eff_path and sequence_parallel change nothing. process_group is refused.
    """

    __module__ = "margay.nn"      # which pickles name

    def __init__(self, d_model, d_state=128, d_conv=4, conv_init=None, expand=2, headdim=64, d_ssm=None, ngroups=1,
                 A_init_range=(1, 16), D_has_hdim=False, rmsnorm=True, norm_before_gate=False, dt_min=0.001, dt_max=0.1,
                 dt_init_floor=1e-4, dt_limit=(0.0, math.inf), bias=False, conv_bias=True, chunk_size=256,
                 use_mem_eff_path=True, layer_idx=None, process_group=None, sequence_parallel=True, device=None,
                 dtype=None):
        super().__init__()
        if process_group is not None:
            raise NotImplementedError("Mamba2: process_group is given (tensor parallelism), which is not implemented; "
                                      "expected None")
        place = dict(device=device, dtype=dtype)
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner = expand * d_model
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm
        if headdim < 1 or self.d_ssm % headdim or not 0 < self.d_ssm <= self.d_inner:
            raise ValueError(f"Mamba2: d_ssm is {self.d_ssm}, expected a multiple of headdim, which is {headdim}, up "
                             f"to expand * d_model, which is {self.d_inner}")
        self.headdim, self.nheads, self.ngroups = headdim, self.d_ssm // headdim, ngroups
        if ngroups < 1 or self.nheads % ngroups:
            raise ValueError(f"Mamba2: ngroups is {ngroups}, expected a divisor of the {self.nheads} heads")
        if not 0 < A_init_range[0] <= A_init_range[1]:
            raise ValueError(f"Mamba2: A_init_range is {A_init_range}, expected two positive numbers, the smaller "
                             "first")
        self.rmsnorm, self.norm_before_gate, self.D_has_hdim = rmsnorm, norm_before_gate, D_has_hdim
        self.dt_limit, self.activation, self.chunk_size, self.layer_idx = dt_limit, "silu", chunk_size, layer_idx

        width = self.d_ssm + 2 * ngroups * d_state
        self.in_proj = torch.nn.Linear(d_model, 2 * self.d_inner - self.d_ssm + width + self.nheads, bias, **place)
        self.conv1d = torch.nn.Conv1d(width, width, d_conv, groups=width, padding=d_conv - 1, bias=conv_bias, **place)
        if conv_init is not None:
            torch.nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        dt = torch.exp(torch.rand(self.nheads, device=device) * math.log(dt_max / dt_min)) * dt_min
        dt = dt.clamp(min=dt_init_floor)
        self.dt_bias = torch.nn.Parameter((dt + torch.log(-torch.expm1(-dt))).to(dtype))        # softplus gives dt
        a = torch.empty(self.nheads, device=device, dtype=torch.float32).uniform_(*A_init_range)
        self.A_log = torch.nn.Parameter(torch.log(a).to(dtype))
        self.D = torch.nn.Parameter(torch.ones(self.d_ssm if D_has_hdim else self.nheads, device=device))
        for parameter in (self.dt_bias, self.A_log, self.D):
            parameter._no_weight_decay = True                    # which training programs look for
        if rmsnorm:
            self.norm = RMSNormGated(self.d_ssm, 1e-5, self.d_ssm // ngroups, norm_before_gate, **place)
        self.out_proj = torch.nn.Linear(self.d_inner, d_model, bias, **place)

    def forward(self, u, seqlen=None, seq_idx=None, cu_seqlens=None, inference_params=None):
        """u [batch, steps, d_model], or with seqlen [batch * seqlen, d_model].

        seq_idx: integers [batch, steps]; where they change, a sequence begins. cu_seqlens: starts of packed sequences
        of batch 1, which see nothing of each other. inference_params: as mamba_ssm's, seqlen_offset and
        key_value_memory_dict; at offset 0 the states behind the last step, or with cu_seqlens those behind each
        sequence, are put there; later the layer continues from them as `step` does.
        """
        x = u if seqlen is None else u.unflatten(0, (-1, seqlen))
        states = None
        if inference_params is not None:
            states = self._states(inference_params, len(x) if cu_seqlens is None else len(cu_seqlens) - 1)
        if states is not None and inference_params.seqlen_offset > 0:
            out = self.step(x, *states)[0]
        else:
            out = self._sequence(x, seq_idx, cu_seqlens, states)
        return out if seqlen is None else out.flatten(0, 1)

    def _sequence(self, x, seq_idx, cu_seqlens, states):
        mlp, z, xbc, dt = self._split(self.in_proj(x))
        packed = None if cu_seqlens is None else cu_seqlens.int()
        y, last = self.mix(xbc, dt, None if self.rmsnorm else z, seq_idx, packed)
        if states is not None:
            with torch.no_grad():
                self._remember(states, xbc, last, packed)
        return self._project(y, z, mlp)

    def mix(self, xbc, dt, z=None, seq_idx=None, cu_seqlens=None):
        """The convolution and the scan, for a subclass to do something before or instead of them: y [batch, steps,
        d_ssm], times silu(z) where that is given, and the last states."""
        xbc = causal_conv1d(xbc, self._taps(), self.conv1d.bias, activation=self.activation, seq_idx=int32(seq_idx),
                            cu_seqlens=cu_seqlens)
        return self._scan(xbc, dt, z, seq_idx=seq_idx, cu_seqlens=cu_seqlens)

    @torch.no_grad()
    def step(self, hidden_states, conv_state, ssm_state):
        """A few more steps of each sequence, [batch, steps, d_model], mostly one. Returns the result and the states,
        which are updated in place. Not differentiable."""
        mlp, z, xbc, dt = self._split(self.in_proj(hidden_states))
        xbc = causal_conv1d_step(xbc.to(conv_state.dtype), conv_state.transpose(1, 2), self._taps(), self.conv1d.bias,
                                 activation=self.activation).to(xbc.dtype)
        if hidden_states.shape[1] != 1:
            y, last = self._scan(xbc, dt, None if self.rmsnorm else z, initial_states=ssm_state)
            ssm_state.copy_(last)
        else:
            x, b, c = xbc[:, 0].split((self.d_ssm, *[self.ngroups * self.d_state] * 2), dim=-1)
            heads, groups = (self.nheads, self.headdim), (self.ngroups, self.d_state)
            y = ssd_step(ssm_state, x.unflatten(-1, heads), dt[:, 0], self._a(), b.unflatten(-1, groups),
                         c.unflatten(-1, groups), D=self._d(), z=None if self.rmsnorm else z[:, 0].unflatten(-1, heads),
                         dt_bias=self.dt_bias, dt_softplus=True, dt_limit=self.dt_limit).flatten(1)[:, None]
        return self._project(y, z, mlp), conv_state, ssm_state

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, **kwargs):
        """States of `step` before a first one, zeros: of the convolution [batch, channels, d_conv], as its weights, and
        of the scan [batch, heads, headdim, d_state], float32; both of dtype if that is given."""
        weight = self.conv1d.weight
        conv_state = weight.new_zeros(batch_size, self.d_conv, len(weight), dtype=dtype).transpose(1, 2)
        return conv_state, weight.new_zeros(batch_size, self.nheads, self.headdim, self.d_state,
                                            dtype=dtype or torch.float32)

    def _states(self, inference_params, batch):
        if self.layer_idx is None:
            raise ValueError("Mamba2: inference_params is given and layer_idx is None, expected the layer's number")
        known = inference_params.key_value_memory_dict
        if self.layer_idx not in known:
            known[self.layer_idx] = self.allocate_inference_cache(batch, 0)
        return known[self.layer_idx]

    def _remember(self, states, xbc, last, cu_seqlens):
        conv_state, ssm_state = states
        if cu_seqlens is None:                   # zeros in front of what is shorter than the state
            conv_state.copy_(torch.nn.functional.pad(xbc.transpose(1, 2), (self.d_conv - xbc.shape[1], 0)))
        else:
            conv_state.copy_(causal_conv1d_varlen_states(xbc[0], cu_seqlens, self.d_conv))
        ssm_state.copy_(last)

    def _split(self, zxbcdt):
        return split_projection(zxbcdt, self.d_ssm, len(self.conv1d.weight), self.nheads)

    def _taps(self):
        return self.conv1d.weight[:, 0]

    def _a(self):
        return -torch.exp(self.A_log.float())

    def _d(self):
        return self.D.unflatten(0, (self.nheads, -1)) if self.D_has_hdim else self.D

    def _scan(self, xbc, dt, z, **options):
        return scan(xbc, dt, self._a(), self._d(), self.ngroups, self.d_ssm, z, dt_bias=self.dt_bias,
                    dt_limit=self.dt_limit, **options)

    def _project(self, y, z, mlp):
        return self.out_proj(join_mlp(self.norm(y, z) if self.rmsnorm else y, mlp))

    def extra_repr(self):
        return (f"d_model={self.d_model}, d_state={self.d_state}, nheads={self.nheads}, headdim={self.headdim}, "
                f"ngroups={self.ngroups}")
