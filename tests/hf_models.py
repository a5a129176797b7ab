"""What tests with transformers' models share: small models with random weights, what they are given, calls that fall
back."""

import contextlib
import warnings

import pytest
import torch

import margay as mg
from margay.drop_ins import fallback

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def hub_kernels():
    """The module of transformers that chooses functions; tests of older releases are skipped."""
    module = pytest.importorskip("transformers.integrations.hub_kernels", reason="transformers is too old")
    if not hasattr(module, "use_kernel_func_from_hub_with_fallback"):
        pytest.skip("transformers before 5.17", allow_module_level=True)
    return module


@contextlib.contextmanager
def no_fallback(monkeypatch):
    """A fallback is an error."""
    monkeypatch.setattr(fallback, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error", mg.FallbackWarning)
        yield


def reasons(run):
    """run(), and why it fell back."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", mg.FallbackWarning)
        result = run()
    return result, [str(w.message) for w in seen if issubclass(w.category, mg.FallbackWarning)]


def count(monkeypatch, functions):
    """The list of the names of these functions, by modules, that are called from now on."""
    seen = []

    def counted(name, function):
        def call(*arguments, **options):
            seen.append(name)
            return function(*arguments, **options)
        return call
    for module, names in functions.items():
        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return seen


def make(family, options, device="cpu", dtype=None):
    """The weights are larger than the initialisation, so that the layers do something."""
    torch.manual_seed(0)
    kind = getattr(transformers, family + "ForCausalLM")
    model = kind(kind.config_class(**options))
    if options.get("attn_logit_softcapping"):
        model.set_attn_implementation("eager")            # older releases have sdpa, which forgets it
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[-1] in ("D", "dt_bias") or "conv1d" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
            elif parameter.dim() > 1 and "A_log" not in name:
                parameter.mul_(2)
    return model.eval().to(device, dtype or (torch.float32 if device == "cpu" else torch.bfloat16))


def in_float32(model):
    wide = type(model)(model.config).to(model.device, torch.float32).train(model.training)
    wide.load_state_dict(model.state_dict())
    return wide


def tokens(*shape, device="cpu"):
    return torch.randint(3, 99, shape, generator=torch.Generator().manual_seed(4)).to(device)


def padding(batch, rows, side, device="cpu"):
    mask = torch.ones(batch, rows, dtype=torch.long)
    for i in range(batch):
        n = (3 * i) % (rows - 1)
        mask[i, :n] *= side == "right"
        mask[i, rows - n:] *= side == "left"
    return mask.to(device)


def results(model, run):
    """Logits of what counts, and the gradients of all parameters."""
    model.zero_grad()
    logits = run(model)
    logits.float().square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def no_worse(name, found, plain, exact, factor=2):
    """Of bfloat16: not further from the model in float32 than `factor` times what PyTorch is, in the mean square. The
    largest error of all elements says less: a norm of what is nearly 0 makes much of one rounding, and which it is
    differs from one way of rounding to the other. Where elements are few, so does their mean."""
    assert found.isfinite().all(), name
    error, allowed = found.double() - exact, plain.double() - exact
    few = (4 if found.numel() < 16 else 2 * (found.numel() < 500)) * torch.finfo(found.dtype).eps * float(
        exact.abs().max())
    for what, of, times in (("error", lambda t: float(t.abs().max()), 2 * factor),
                            ("mean square", lambda t: float(t.square().mean().sqrt()), factor)):
        limit = times * of(allowed) + torch.finfo(found.dtype).eps * of(exact) + few
        assert of(error) <= limit, f"{name}: {what} {of(error):.2e}, allowed {limit:.2e} of {of(exact):.2e}"
