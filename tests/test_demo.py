"""The demo: a short run, what it refuses, and that its comparison can fail."""

import sys

import pytest
import torch

import margay as mg
from margay import demo


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(demo.SIZES, "cpu", dict(rows=48, batch=2, layers=2, width=64, heads=2, kv_heads=1, steps=12))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)          # the model is too small for more
    yield
    torch.set_num_threads(threads)


def test_run(small, tmp_path, capsys):
    assert demo.main(["--device", "cpu", "--steps", "12", "--out", str(tmp_path / "new")]) == 0
    output = capsys.readouterr().out
    for part in ("tokens/s", "largest distance", "sample of the margay run", "agree to rounding", "12/12"):
        assert part in output
    assert (tmp_path / "new" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_text(small, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 8)
    assert demo.main(["--text", str(text), "--device", "cpu", "--steps", "2", "--out", str(tmp_path)]) == 0
    assert "2,048 bytes of text" in capsys.readouterr().out
    text.write_bytes(b"short")
    assert demo.main(["--text", str(text), "--device", "cpu"]) == 2


@pytest.mark.parametrize("arguments", (["--steps", "0"], ["--text", "no such file"], ["--device", "tpu"]))
def test_refuses(arguments):
    with pytest.raises(SystemExit) as stop:
        demo.main(arguments)
    assert stop.value.code == 2


@pytest.mark.parametrize("wrong", ("scale", "forward", "backward", "nan"))
def test_comparison_can_fail(small, tmp_path, monkeypatch, capsys, wrong):
    """An attention that is wrong by little more than rounding is found."""
    def attention(q, k, v, **options):
        if wrong == "scale":
            options["scale"] = q.shape[3] ** -0.5 * 1.01
        out = mg.attention(q, k, v, **options)
        if wrong == "forward":
            return out * 1.001
        if wrong == "backward":
            return out.detach() + (out - out.detach()) * 1.01
        return out * float("nan") if wrong == "nan" else out

    monkeypatch.setattr("margay.nn.attention", attention)
    assert demo.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_default_text():
    text = demo.default_text()
    assert text == demo.default_text() and len(text) > 200_000 and len(set(text)) > 60


def test_without_matplotlib(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert demo.main(["--device", "cpu", "--steps", "2", "--out", str(tmp_path)]) == 0
    assert "no plot" in capsys.readouterr().out


def test_allowed_distance():
    losses = torch.tensor([5.0, 4.0, 3.0], dtype=torch.float64)
    allowed = demo.allowed_distance(losses, losses + torch.tensor([0.0, 1e-4, 1e-5], dtype=torch.float64))
    assert allowed[0] < 1e-5 and allowed[1] == pytest.approx(demo.PART * 1e-4, rel=0.01) == pytest.approx(float(allowed[2]), rel=0.01)
