"""The drop-ins' modules are found where programs import them from."""

import importlib
import pickle

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import margay as mg

PUBLIC = {
    "margay.flash_attn": ("margay.drop_ins.flash_attn2", ("flash_attn_func", "flash_attn_with_kvcache",
                                                          "install_as_flash_attn", "unpad_input", "__version__")),
    "margay.flash_attn_interface":
    ("margay.drop_ins.flash_attn3", ("flash_attn_func", "flash_attn_combine", "get_scheduler_metadata")),
    "margay.bert_padding": ("margay.drop_ins.bert_padding",
                            ("index_first_axis", "pad_input", "unpad_input", "unpad_input_for_concatenated_sequences")),
    "margay.sdpa": ("margay.drop_ins.sdpa", ("enable_sdpa",)),
    "margay.nn": ("margay.drop_ins.multihead_attention", ("MultiheadAttention",)),
    "margay.integrations.mamba": ("margay.drop_ins.mamba_ssm", ("register", "unregister", "install_as_mamba_ssm")),
    "margay": ("margay.drop_ins.fallback", ("FallbackWarning",)),
    "margay.integrations.delta": ("margay.drop_ins.delta_models", ("register", "unregister")),
    "margay.integrations.fla": ("margay.drop_ins.fla", ("register", "unregister")),
    "margay.flashinfer": ("margay.drop_ins.flashinfer", ("chunk_gated_delta_rule",)),
    "margay.flash_kda": ("margay.drop_ins.flash_kda", ("fwd",)),
    "margay.integrations.hf": ("margay.drop_ins.hf", ("register", "attention", "attention_mask")),
}


@pytest.mark.parametrize("path", PUBLIC)
def test_public_path(path):
    if path.endswith("hf"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    home, names = PUBLIC[path]
    public, home = importlib.import_module(path), importlib.import_module(home)
    assert public.__doc__ and all(getattr(public, name) is getattr(home, name)
                                  for name in (*names, *getattr(home, "__all__", ())))


def test_layers_are_pickled_by_their_public_names():
    for layer in (mg.nn.Attention(8, 2), mg.nn.MultiheadAttention(8, 2), mg.nn.Mamba2(64), mg.nn.GatedDeltaNet(64),
                  mg.nn.KimiDeltaAttention(64)):
        data = pickle.dumps(layer)
        assert b"margay.nn" in data and b"drop_ins" not in data and type(pickle.loads(data)) is type(layer)
