"""Every row's GPU image: no spills, no stack, no serialised matrix instructions, matrix and tensor-copy instructions
where the source has them."""
import collections
import functools
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
sys.path.insert(0, str(ROOT / "tools"))
import cubin  # noqa: E402

from margay import _C  # noqa: E402

ROWS = dict(cubin.rows())
ALLOWED_NOTES = {"C7519"}            # the matrix instructions' fence is needed: true, and wanted
REGISTERS_OF_AN_SM = 65536
BUILT = [kernel["name"] for kernel in _C.kernels() if kernel["where"] != "cpu"]
NO_IMAGES = "no GPU kernels were built: nvcc was not found, or MARGAY_CUDA=0"
with_images = pytest.mark.skipif(not _C.info()["cuda_built"], reason=NO_IMAGES)


def constants(kernel):
    return {name: int(value) for name, value in re.findall(r"(\w+)\s*=\s*(\d+)", kernel["constants"])}


@functools.cache
def reached(source, root=CSRC):
    """The text of a kernel file and of the functions that it calls from its headers, but for the tile layer's."""
    file = next(root.glob(f"*/{source}.cu"))
    called, files, todo = [], {file}, [file]
    functions = collections.defaultdict(list)
    while todo:
        at = todo.pop()
        text = re.sub(r"//.*", "", at.read_text())
        for name in re.findall(r'^#include "([^"]+)"', text, re.M):
            header = next(path for path in (at.parent / name, root / name) if path.exists())
            if header not in files and root / "tile" not in header.parents:
                files.add(header)
                todo.append(header)
        if at == file:
            called.append(text)
        else:
            for part in re.split(r"\n(?=[A-Za-z])", text):      # a function, a struct, a macro's use
                if name := re.search(r"(\w+)\s*\(", part):
                    functions[name[1]].append(part)
    for text in called:                                         # grows meanwhile
        for word in set(re.findall(r"\w+", text)) & set(functions):
            called += functions.pop(word)
    return "\n".join(called)


def has_products_of_warps(source):
    return re.search(r"\b(mma_own\w*|invert_rest)\(", reached(source))


@pytest.fixture(scope="module")
def kernels():
    return {kernel["name"]: kernel for kernel in _C.kernels()}


@with_images
def test_every_row_has_an_image():
    assert sorted(ROWS) == sorted(BUILT)


@with_images
@pytest.mark.parametrize("name", BUILT)
class TestImage:
    def test_nothing_spills(self, name):
        row = ROWS[name]
        assert {key: row[key] for key in ("spill_stores", "spill_loads", "stack", "LDL", "STL")} == dict.fromkeys(
            ("spill_stores", "spill_loads", "stack", "LDL", "STL"), 0)

    def test_ptxas_has_no_complaint(self, name):
        assert set(ROWS[name]["warnings"]) <= ALLOWED_NOTES

    def test_registers_leave_room_for_the_resident_blocks(self, name, kernels):
        assert 0 < ROWS[name]["registers"] * kernels[name]["threads"] <= REGISTERS_OF_AN_SM
        budgets = {key: value for key, value in constants(kernels[name]).items() if key.endswith("_REGS")}
        assert all(24 <= value <= 240 and value % 8 == 0 for value in budgets.values() if value), budgets

    def test_matrix_instructions_are_where_the_source_has_products(self, name, kernels):
        panel = 4                    # a product over one 64-wide panel is four instructions; a lone commit leaves a
                                     # single placeholder
        wanted, other = ("QGMMA", "HGMMA") if kernels[name]["dtype"] == "float8_e4m3fn" else ("HGMMA", "QGMMA")
        products = constants(kernels[name]).get("PAIRS", 1)      # 0: kda_prepare's are left out
        if products and re.search(r"\bmma(<|_A\w+[<(])", reached(kernels[name]["source"])):
            assert ROWS[name][wanted] >= panel
        else:
            assert ROWS[name][wanted] == 0
        assert ROWS[name][other] == 0
        if ROWS[name]["HMMA"]:
            assert has_products_of_warps(kernels[name]["source"])

    def test_tiles_come_by_tensor_copies(self, name, kernels):
        assert (ROWS[name]["UTMALDG"] > 0) == ("tma_load" in reached(kernels[name]["source"]))


@with_images
def test_products_of_warps_are_instructions(kernels):
    """A row may leave them out by its constants, as one does that reads what another prepared; not every row may."""
    sources = collections.defaultdict(list)
    for name in BUILT:
        sources[kernels[name]["source"]].append(name)
    for source, names in sources.items():
        if has_products_of_warps(source):
            assert any(ROWS[name]["HMMA"] for name in names), names


@pytest.mark.parametrize("top, found", (("mma<2>(0);", True), ("of_a(1);", True), ("// of_a(1);", False), ("", False)))
def test_reached_follows_includes_and_calls(top, found, tmp_path):
    """A product counts where the kernel has it or calls it, in headers of headers too; not where a header offers it."""
    (tmp_path / "a.h").write_text('#include "b.h"\ntemplate<int N> TILE int of_a(int x) {\n  return of_b(x);\n}\n')
    (tmp_path / "b.h").write_text("TILE int of_b(int x) {\n  mma<1>(x);  // a product\n  return x;\n}\n")
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "k.cu").write_text(f'#include "a.h"\nTILE void run() {{\n  {top}\n}}\n')
    assert ("mma<" in reached("k", tmp_path)) == found
