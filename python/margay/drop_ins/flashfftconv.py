"""FlashFFTConv's module, on `margay.fft_conv`: `from margay.flashfftconv import FlashFFTConv`."""

import re

import torch
import torch.nn.functional as F

from margay.families.fft_conv import fft_conv

__all__ = ["FlashFFTConv"]


class FlashFFTConv(torch.nn.Module):
    """As flashfftconv.FlashFFTConv: the convolution of period seqlen, of which the first L elements are returned.

    seqlen: the transform's length; any, where the package takes powers of two. dtype: of u in its calls; others are
    computed too. use_32_butterfly changes nothing. The tables that the package has in its state dict are neither made
    nor wanted: state dicts with them can be loaded.
    """

    def __init__(self, seqlen, dtype=torch.float16, use_32_butterfly=True):
        super().__init__()
        if seqlen < 1:
            raise ValueError(f"FlashFFTConv: seqlen is {seqlen}, expected 1 or more")
        self.seqlen, self.dtype = seqlen, dtype

    def forward(self, u, k, pregate=None, postgate=None):
        """u, pregate, postgate [B, H, L], k [H, Lk], L and Lk at most seqlen. Causal where nothing can wrap around."""
        length = u.shape[-1]
        if max(length, k.shape[-1]) > self.seqlen:
            raise ValueError(f"FlashFFTConv: rows of {length} and filters of {k.shape[-1]} elements, expected at most "
                             f"{self.seqlen}")
        if length + k.shape[-1] - 2 < self.seqlen:
            return fft_conv(u, k[:, :length], pregate=pregate, postgate=postgate)
        missing = self.seqlen - length
        if missing:
            u, pregate, postgate = (t if t is None else F.pad(t, (0, missing)) for t in (u, pregate, postgate))
        return fft_conv(u, k, causal=False, pregate=pregate, postgate=postgate)[..., :length]

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        for name in [name for name in state_dict if name.startswith(prefix)]:
            if re.fullmatch(r"f_\w+_i?fft(_real|_imag)?|twiddle_factors_i?fft\w*|twid", name[len(prefix):]):
                del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *arguments)
