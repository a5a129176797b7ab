"""Importing is cheap and touches nothing; the stubs describe the module."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import margay as mg
from margay import _C

TRIES = 15
STUBS = ast.parse((Path(mg.__file__).parent / "_C.pyi").read_text())


def python(program):
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_time():
    """Below 50 ms in a process; several are tried, because other tests run beside this one."""
    program = "import time; t = time.perf_counter(); import margay; print(time.perf_counter() - t)"
    assert any(float(python(program)) < 0.05 for _ in range(TRIES))


def test_import_loads_nothing():
    loaded = python("import sys, margay; print(*sys.modules)").split()
    assert not {"torch", "numpy", "collections", "margay.nn"} & set(loaded)
    assert not [name for name in loaded if name.startswith("margay.")
                and name.endswith(("_torch", "_numpy", "._C", "._op"))]
    maps = python("import margay._C; print(open('/proc/self/maps').read())")
    assert "_C.abi3.so" in maps and "libcuda" not in maps and "libstdc++" not in maps


@pytest.mark.parametrize("call", ("mg.attention(q, q, q)", "mg.ssd(q, q[..., 0].abs(), -q[0, 0, :, 0].abs(), q, q)"))
def test_first_call_time(call):
    """Below 50 ms after torch's own start-up."""
    program = """
import time, torch
q = torch.randn(1, 2, 64, 64)
q @ q.mT
t = time.perf_counter()
import margay as mg
CALL
print(time.perf_counter() - t)
"""
    assert any(float(python(program.replace("CALL", call))) < 0.05 for _ in range(TRIES))


def test_public_names():
    assert {"attention", "matmul", "explain", "info", "nn"} <= set(mg.__all__) and mg.nn.Attention
    assert all(getattr(mg, name) for name in mg.__all__) and set(mg.__all__) <= set(dir(mg))
    assert f'\nversion = "{mg.__version__}"\n' in (Path(__file__).parent.parent / "pyproject.toml").read_text()
    with pytest.raises(AttributeError, match="module 'margay' has no attribute 'softmax'"):
        mg.softmax


def test_every_package_is_installed():
    named = re.search(r"^packages = (\[.*?\])$", (Path(__file__).parent.parent / "pyproject.toml").read_text(),
                      re.M | re.S)
    folders = [".".join(path.parent.relative_to(Path(mg.__file__).parent.parent).parts)
               for path in Path(mg.__file__).parent.rglob("__init__.py")]
    assert set(ast.literal_eval(named.group(1))) == set(folders)


# ---- stubs


def stubs():
    return {node.name: node for node in STUBS.body if isinstance(node, ast.FunctionDef)}


def test_stubs_name_every_function():
    public = {name for name, value in vars(_C).items() if not name.startswith("_") and callable(value)}
    assert set(stubs()) == public


@pytest.mark.parametrize("name", sorted(stubs()))
def test_stub_has_the_modules_arguments(name):
    """A function's docstring begins with its signature: the same names in the same order, the same defaults; and it
    takes that many."""
    arguments = stubs()[name].args
    doc = re.match(rf"{name}\((.*?)\)", inspect.getdoc(getattr(_C, name)))
    assert doc, f"{name}: the docstring does not begin with its signature"
    if arguments.kwarg:                                       # explain: problem fields by keyword
        assert doc.group(1).startswith("op, *")
        return
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    defaults = [ast.unparse(default).replace("e-0", "e-") for default in arguments.defaults]
    required = len(names) - len(defaults)
    written = names[:required] + [n if d == "None" else f"{n}={d}" for n, d in zip(names[required:], defaults)]
    found = doc.group(1).replace(" or None", "").replace("=false", "=False").replace("=true", "=True")
    assert found.removesuffix(", ") == ", ".join(written)
    for count in (len(names) - len(defaults) - 1, len(names) + 1):
        if count >= 0:
            missing = _C.ops().get(name.removesuffix("_workspace"), [{"name": name}])[0]["name"] + r": \w+ is missing"
            with pytest.raises(TypeError, match=name if count > len(names) else f"{name}|{missing}"):
                getattr(_C, name)(*[None] * count)


def test_stubs_type_check(tmp_path):
    """mypy's stubtest imports the module and compares."""
    pytest.importorskip("mypy")
    result = subprocess.run([sys.executable, "-m", "mypy.stubtest", "margay._C", "--ignore-missing-stub"],
                            capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
