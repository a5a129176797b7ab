"""Which lines of a kernel its instructions come from.

    python tools/instructions.py ROW [MOST]     a row of the last build, from build/kernels.json; MOST kinds a line, 6

The row is compiled again with -lineinfo. A disassembler then names, for every instruction, the chain of lines that it
was inlined from. Counted here is the line of the kernel's file that stands in a role's body, so a call of a function
there has all that became of it. Instructions of called functions (tile/cold.h) and what belongs to no line come first.

A count is of what lies there: loops and branches not taken are not followed. Wants nvcc, and nvdisasm: $NVDISASM, or in
the path (PyPI's nvidia-cuda-nvdisasm has one).
"""
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r'\s*//## File "([^"]*)", line (\d+)(?: inlined at "([^"]*)")?')
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)")


def disassembly(row, file):
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "image.cubin"
        command = [os.environ.get("NVCC", "nvcc"), "-std=c++17", "-O3", "-lineinfo", "-cubin",
                   "-gencode=arch=compute_90a,code=sm_90a", f"-I{ROOT / 'csrc'}", f"-DKERNEL={row['name']}",
                   f"-DELEM={row['dtype']}", f"-DCONSTANTS={row['constants']}".replace(",", "\\,"), "-o", cubin, file]
        subprocess.run(command, check=True)
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
    rows = json.loads((ROOT / "build" / "kernels.json").read_text())["kernels"]
    row = next((row for row in rows if row["name"] == sys.argv[1]), None)
    if not row:
        raise SystemExit(f"{sys.argv[1]}: no row of the last build")
    file = next((ROOT / "csrc").glob(f"*/{row['source']}.cu"))
    source, most = file.read_text().splitlines(), int(sys.argv[2]) if len(sys.argv) > 2 else 6
    for line, kinds in sorted(by_line(disassembly(row, file), file).items(), key=lambda pair: pair[0] or 0):
        words = "called, or of no line" if line is None else f"{line:4} {source[line - 1].strip()}"
        print(f"{kinds.total():6}  {words[:80]:80}  {' '.join(f'{k} {n}' for k, n in kinds.most_common(most))}")


if __name__ == "__main__":
    main()
