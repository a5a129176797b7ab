"""A layer of `margay.fft_conv`."""

import math

import torch

from margay.families.fft_conv import fft_conv


class LongConv(torch.nn.Module):
    """A filter as long as the sequence for each channel, and a skip: x [batch, channels, length] to the same shape.

    filter: a module or function that gives k [channels, up to length], as Hyena's implicit filters do; called in each
        forward. If None, the filter is a parameter `kernel` [channels, length], normal with variance 1 / length.
    skip: has a parameter `skip` [channels], normal.
    causal, precise: as of `margay.fft_conv`.
    """

    def __init__(self, channels, length, *, filter=None, skip=True, causal=True, precise=False, device=None):
        super().__init__()
        if channels < 1 or length < 1:
            raise ValueError(f"LongConv: channels is {channels} and length {length}, expected 1 or more")
        self.channels, self.length, self.causal, self.precise = channels, length, causal, precise
        self.filter = filter
        self.kernel = (torch.nn.Parameter(torch.randn(channels, length, device=device) / math.sqrt(length))
                       if filter is None else None)
        self.skip = torch.nn.Parameter(torch.randn(channels, device=device)) if skip else None

    def forward(self, x, pregate=None, postgate=None):
        """Rows may be shorter than length where causal; the filter is then cut."""
        k = self.kernel if self.filter is None else self.filter()
        if k.shape[-1] > x.shape[-1] and self.causal:
            k = k[:, :x.shape[-1]]
        return fft_conv(x, k, causal=self.causal, pregate=pregate, postgate=postgate, skip=self.skip,
                        precise=self.precise)

    def extra_repr(self):
        return f"{self.channels}, {self.length}, causal={self.causal}, precise={self.precise}"
