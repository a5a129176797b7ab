"""Causal convolution: causal_conv1d, and its step for generation."""
