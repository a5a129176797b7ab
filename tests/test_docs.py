"""The documentation's code runs, and what it shows is what the repository has."""
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trees import share_cache

ROOT = Path(__file__).resolve().parent.parent
CHAPTER = (ROOT / "docs" / "01-first-kernel.md").read_text()
DEFINITIONS = (ROOT / "csrc" / "scaled_add" / "kernels.def").read_text()


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


(KERNEL,) = blocks(CHAPTER, "cuda")
(ROW,) = blocks(CHAPTER, "text")


def test_first_kernel_is_the_repositorys():
    assert KERNEL == (ROOT / "csrc" / "scaled_add" / "scaled_add.cu").read_text()
    assert ROW in DEFINITIONS
    params = blocks(CHAPTER, "c")[0]
    assert params in (ROOT / "csrc" / "scaled_add" / "scaled_add.h").read_text()


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory):
    """A copy of the repository without the kernel, to which the chapter's file and row are then added."""
    tree = tmp_path_factory.mktemp("newcomer")
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    shutil.copytree(ROOT / "python", tree / "python",
                    ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    share_cache(tree)
    without = "".join(line for line in DEFINITIONS.splitlines(True) if not line.startswith("KERNEL(scaled_add"))
    assert "KERNEL" not in without
    (tree / "csrc" / "scaled_add" / "kernels.def").write_text(without + ROW)
    (tree / "csrc" / "scaled_add" / "scaled_add.cu").write_text(KERNEL)
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
                   cwd=tree, check=True, env={**os.environ, "MARGAY_ROWS": "scaled_add.*"})
    return tree


def test_first_kernel_builds_and_runs(newcomer):
    (program,) = blocks(CHAPTER, "python")
    result = subprocess.run([sys.executable, "-c", program], cwd=newcomer,
                            env={**os.environ, "PYTHONPATH": str(newcomer / "python")},
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "scaled_add_bf16 takes it" in result.stdout


def test_readme_example_runs():
    program = "\n".join(blocks((ROOT / "README.md").read_text(), "python"))      # one after the other
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "attention_fwd" in result.stdout


@pytest.mark.parametrize("kind", ("sdpa", "transformers"))
def test_readme_two_lines_move_a_model(kind):
    """A Llama with grouped queries and random weights, as README switches it: Margay computes its attention, and the
    logits stay."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    readme = (ROOT / "README.md").read_text()
    (sdpa,) = [block for block in blocks(readme, "python") if "enable_sdpa" in block]
    (transformers,) = re.findall(r"((?:^    .*\n)*^    .*set_attn_implementation.*\n)", readme, re.M)
    lines = {"sdpa": sdpa, "transformers": "import margay\n" + textwrap.dedent(transformers)}[kind]
    assert len(lines.splitlines()) == {"sdpa": 2, "transformers": 3}[kind]
    program = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
sizes = dict(vocab_size=99, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa")).eval()
tokens = torch.randint(99, (2, 70))
with torch.no_grad():
    eager = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="eager")).eval()
    eager.load_state_dict(model.state_dict())
    expected = eager(tokens).logits
LINES
from margay import _C
used, fwd = [], _C.attention_fwd
_C.attention_fwd = lambda *a: used.append(1) or fwd(*a)
with torch.no_grad():
    logits = model(tokens).logits
assert len(used) == 2, f"{len(used)} calls of Margay, expected one a layer"
difference = (logits - expected).abs().max()
print("largest logit", expected.abs().max(), "largest difference", difference)
assert difference < 1e-5 and not torch.equal(logits, expected * 0)
""".replace("LINES", lines)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_drop_ins_examples_run():
    pytest.importorskip("transformers", reason="transformers is not installed")
    program = "\n".join(blocks((ROOT / "docs" / "drop_ins.md").read_text(), "python"))
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", [path.relative_to(ROOT)
                                  for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]], ids=str)
def test_pages_name_files_that_exist(page):
    text = (ROOT / page).read_text()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    links = [target for target in re.findall(r"\]\(([^)]+)\)", prose) if "://" not in target]
    files = re.findall(r"\b((?:csrc|python/margay|tests|tools|docs|benchmarks|examples)/"
                       r"[\w./-]*\w\.(?:cu|c|h|def|py|pyi|md))\b", text)
    missing = ([link for link in links if not leads_somewhere(ROOT / page, link)] +
               [name for name in files if not (ROOT / name).exists()])
    assert missing == []


def leads_somewhere(page, link):
    """A file that exists and, behind #, one of its headings as GitHub names them."""
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not anchor:
        return target.exists()
    headings = re.findall(r"^#+ (.*)", target.read_text(), re.M) if target.exists() else []
    return anchor in [re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings]


def test_every_bad_input_row_has_a_test_and_every_test_a_row():
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "bad_inputs.md").read_text(), re.M)}
    names = re.findall(r"^\s*(?:def|class) (test_bad_[\d_]+|TestBad[\d_]+)",
                       "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py")), re.M)
    tested = {int(number) for name in names for number in re.findall(r"\d+", name)}
    assert rows == tested


def test_the_chapter_shows_rows_of_ops_def():
    definition = "".join(path.read_text() for path in (ROOT / "csrc").glob("*/ops.def"))
    shown = [row for block in re.findall(r"^```c\n(.*?)^```", CHAPTER, re.M | re.S)
             for row in re.findall(r"^OP\(.*?\)\)\n", block, re.M | re.S)]
    assert len(shown) == 3 and all(row in definition for row in shown)
