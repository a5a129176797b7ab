"""Every row's GPU image: no spills, no stack, no serialised matrix instructions, matrix and tensor-copy instructions where the source has them."""
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
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
        source = (ROOT / "csrc" / "kernels" / f"{kernels[name]['source']}.cu").read_text()
        panel = 4                    # a product over one 64-wide panel is four instructions; a lone commit leaves a single placeholder
        wanted, other = ("QGMMA", "HGMMA") if kernels[name]["dtype"] == "float8_e4m3fn" else ("HGMMA", "QGMMA")
        if re.search(r"\bmma(_A\w+)?<", source):
            assert ROWS[name][wanted] >= panel
        else:
            assert ROWS[name][wanted] == 0
        assert ROWS[name][other] == 0
        assert ROWS[name]["HMMA"] == 0

    def test_tiles_come_by_tensor_copies(self, name, kernels):
        source = (ROOT / "csrc" / "kernels" / f"{kernels[name]['source']}.cu").read_text()
        included = [(ROOT / "csrc" / path).read_text() for path in re.findall(r'#include "(kernels/.*)"', source)]
        assert (ROWS[name]["UTMALDG"] > 0) == any("tma_load" in text for text in [source, *included])
