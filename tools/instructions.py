"""Which lines of a kernel its instructions come from.

    python tools/instructions.py ROW [MOST] [PROFILE.csv]   a row of a kernels.def; MOST kinds of instruction a line, 6

The row is compiled as setup.py would, and with -lineinfo. A disassembler then names, for every instruction, the chain
of lines that it was inlined from. Counted here is the line of the kernel's file that stands in a role's body, so a call
of a function there has all that became of it. Instructions of called functions (tile/cold.h) and what belongs to no
line come first.

A count is of what lies there: loops and branches not taken are not followed. PROFILE.csv, a run of the same image under
ncu, says how often they are: of all that was issued, and of all samples, a line's percent come in front. It is made by
    ncu --set full --import-source no -o FILE COMMAND;  ncu -i FILE.ncu-rep --page source --csv > PROFILE.csv

Wants nvcc, and nvdisasm: $NVDISASM, or in the path (PyPI's nvidia-cuda-nvdisasm has one).
"""
import collections
import csv
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


def instructions(text, file):
    """(line or None, opcode) of each. A chain of places, the innermost first, is in front of what it is of."""
    line, complete = None, True
    for words in text.splitlines():
        if place := PLACE.match(words):
            if complete:
                line, complete = None, False
            inner, number, outer = place.groups()
            if Path(inner).name == file.name and outer and Path(outer).name == "block.h":
                line = int(number)
        elif instruction := INSTRUCTION.match(words):
            complete = True
            yield line, instruction[1]


def profiled(path, name):
    """(times issued, samples) of each instruction of a kernel, of its first run in the profile."""
    found, columns = [], None
    with open(path, newline="") as file:
        for words in csv.reader(file):
            if words[:1] == ["Kernel Name"]:
                if found:
                    break
                columns = [] if words[1] == name else None
            elif columns == []:
                columns = [words.index("Instructions Executed"), words.index("# Samples")]
            elif columns:
                found.append([float(words[column] or 0) for column in columns])
    return found


def main():
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    row = next((row for row in all_rows() if row.name == sys.argv[1]), None)
    if not row:
        raise SystemExit(f"{sys.argv[1]}: no row of a kernels.def")
    file = ROOT / row.file()
    source, most = file.read_text().splitlines(), int(sys.argv[2]) if len(sys.argv) > 2 else 6
    listed = list(instructions(disassembly(row), file))
    measured = profiled(sys.argv[3], row.name) if len(sys.argv) > 3 else []
    if measured and len(measured) != len(listed):
        raise SystemExit(f"{sys.argv[3]}: {row.name} has {len(measured)} instructions, the image {len(listed)}")
    kinds, shares = collections.defaultdict(collections.Counter), collections.defaultdict(lambda: [0.0, 0.0])
    for line, opcode in listed:
        kinds[line][opcode] += 1
    totals = [sum(column) or 1.0 for column in zip(*measured)]
    for (line, _), values in zip(listed, measured):
        shares[line] = [share + 100 * value / total for share, value, total in zip(shares[line], values, totals)]
    for line in sorted(kinds, key=lambda line: line or 0):
        words = "called, or of no line" if line is None else f"{line:4} {source[line - 1].strip()}"
        share = "{:5.1f} {:5.1f}  ".format(*shares[line]) if measured else ""
        some = " ".join(f"{kind} {count}" for kind, count in kinds[line].most_common(most))
        print(f"{share}{kinds[line].total():6}  {words[:80]:80}  {some}")


if __name__ == "__main__":
    main()
