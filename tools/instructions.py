"""Which lines of a kernel its instructions come from.

    python tools/instructions.py ROW [MOST]     a row of a kernels.def; MOST kinds of instruction a line, 6

The row is compiled as setup.py would, and with -lineinfo. A disassembler then names, for every instruction, the chain
of lines that it was inlined from. Counted here is the line of the kernel's file that stands in a role's body, so a call
of a function there has all that became of it. Instructions of called functions (tile/cold.h) and what belongs to no
line come first.

A count is of what lies there: loops and branches not taken are not followed. Wants nvcc, and nvdisasm: $NVDISASM, or in
the path (PyPI's nvidia-cuda-nvdisasm has one).
"""
import collections
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from cubin import ROOT

sys.path.insert(0, str(ROOT))
from setup import CSRC, GPU_FLAGS, all_rows  # noqa: E402

PLACE = re.compile(r'\s*//## File "([^"]*)", line (\d+)(?: inlined at "([^"]*)")?')
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)")


def disassembly(row):
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "image.cubin"
        nvcc = [os.environ.get("NVCC", "nvcc"), *GPU_FLAGS, "-lineinfo", f"-I{CSRC}", *row.nvcc_defines()]
        subprocess.run([*nvcc, "-o", cubin, row.file()], cwd=ROOT, check=True, capture_output=True)
        tool = [os.environ.get("NVDISASM", "nvdisasm"), "-c", "-gi", cubin]
        return subprocess.run(tool, check=True, capture_output=True, text=True).stdout


def by_line(text, file):
    """line or None -> counts of opcodes. A chain of places, the innermost first, is in front of what it is of."""
    counts, line, complete = collections.defaultdict(collections.Counter), None, True
    for words in text.splitlines():
        if place := PLACE.match(words):
            if complete:
                line, complete = None, False
            inner, number, outer = place.groups()
            if Path(inner).name == file.name and outer and Path(outer).name == "block.h":
                line = int(number)
        elif instruction := INSTRUCTION.match(words):
            complete = True
            counts[line][instruction[1]] += 1
    return counts


def main():
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    row = next((row for row in all_rows() if row.name == sys.argv[1]), None)
    if not row:
        raise SystemExit(f"{sys.argv[1]}: no row of a kernels.def")
    file = ROOT / row.file()
    source, most = file.read_text().splitlines(), int(sys.argv[2]) if len(sys.argv) > 2 else 6
    for line, kinds in sorted(by_line(disassembly(row), file).items(), key=lambda pair: pair[0] or 0):
        words = "called, or of no line" if line is None else f"{line:4} {source[line - 1].strip()}"
        print(f"{kinds.total():6}  {words[:80]:80}  {' '.join(f'{k} {n}' for k, n in kinds.most_common(most))}")


if __name__ == "__main__":
    main()
