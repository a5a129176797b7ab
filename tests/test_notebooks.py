"""The notebooks run from top to bottom on the CPU and draw; what the repository keeps of their outputs is small."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "benchmarks").glob("*.ipynb"))
MOST_BYTES = 60_000           # of a drawing


def run(path, folder):
    """On the CPU, where there is a GPU too."""
    command = [sys.executable, ROOT / "tools" / "notebooks.py", path, "--out", folder]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def images(path):
    outputs = [output for cell in code_cells(path) for output in cell["outputs"]]
    return [base64.b64decode(output["data"]["image/png"])
            for output in outputs if "image/png" in output.get("data", {})]


def test_there_is_one_for_each_family():
    assert [path.stem for path in NOTEBOOKS] == ["attention", "decode", "delta", "gemm", "ssd"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path):
    result = run(path, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    printed = "".join(line for cell in code_cells(tmp_path / path.name) for output in cell["outputs"]
                      for line in output.get("text", ()))
    assert "cases on cpu" in printed and " x torch" in printed and "FAILED" not in printed
    drawn = images(tmp_path / path.name)
    assert len(drawn) == 3 and all(image.startswith(b"\x89PNG") and len(image) < MOST_BYTES for image in drawn)
    assert ([cell["source"] for cell in code_cells(tmp_path / path.name)] ==
            [cell["source"] for cell in code_cells(path)])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_small(path):
    """Fields that Jupyter wants, no drawing of more than 60 KB, no path of the machine that made them."""
    notebook, text = json.loads(path.read_text()), path.read_text()
    assert notebook["nbformat"] == 4 and all({"cell_type", "id", "metadata", "source"} <= set(cell)
                                             for cell in notebook["cells"])
    assert all({"outputs", "execution_count"} <= set(cell) for cell in code_cells(path))
    assert all(len(image) < MOST_BYTES for image in images(path)) and "/home/" not in text and "/root/" not in text


def test_a_cell_that_fails_stops_the_run(tmp_path):
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "execution_count": None,
            "outputs": [], "source": ["assert 1 == 2"]}
    path = tmp_path / "wrong.ipynb"
    path.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    result = run(path, tmp_path / "out")
    assert result.returncode and "AssertionError" in result.stderr and "wrong.ipynb, cell 1" in result.stderr
    assert not (tmp_path / "out").exists()
