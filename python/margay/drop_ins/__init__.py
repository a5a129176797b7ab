"""Margay behind the interfaces of other libraries. Public import paths are those of the modules above this package,
which name what is here.

    flash_attn2, flash_attn3, bert_padding    margay.flash_attn, margay.flash_attn_interface, margay.bert_padding
    sdpa                                      margay.enable_sdpa
    hf                                        margay.integrations.hf
    multihead_attention, mamba2               margay.nn.MultiheadAttention, margay.nn.Mamba2
    linear_layers                             margay.nn.LinearAttention, Based, Hedgehog
    causal_conv1d                             margay.causal_conv1d
    mamba_ssm                                 margay.integrations.mamba

    kernel_or_torch     what they all call: a kernel, or torch_attention with a warning
    torch_attention     attention in plain PyTorch
    fallback            the warning; needs no torch
    padding             padded batches as packed ones
    kvcache             flash_attn_with_kvcache of both versions
    switch              what functions that switch a drop-in on return
    stand_ins           modules under the names of other packages
"""
