"""Loads of global memory that are waited for too early, in compiled kernels.

    python tools/waits.py                      the rows of the last build, from build/kernels.json
    python tools/waits.py FILE.cubin [...]     some images

A thread of sm_90 has six scoreboards. A load counts up on one and down when it has arrived; who wants its register waits
until that one is at zero. So where ptxas gives one scoreboard to a load that is wanted now and to loads asked for a turn
ahead, the first is waited for with all of them.

Printed are such waits: the instruction, the load that it wants, how many others it waits for besides, and how many
instructions before it the last of them was asked for. Addresses are taken in order, branches are not followed: a line
says where to look, in what a disassembler prints.
"""
import json
import struct
import sys
from pathlib import Path

from cubin import ROOT, sections

LDG = 0x181                     # the low nine bits
NEAR = 80                       # instructions: what was asked for longer ago has mostly arrived


def instructions(code):
    """(address, opcode, registers read, registers written, scoreboard or None, mask of scoreboards waited for)"""
    for at in range(0, len(code), 16):
        low, high = struct.unpack_from("<QQ", code, at)
        control, opcode = high >> 41, low & 0xfff
        width = 1 << max(0, (high >> 9 & 7) - 4) if opcode & 0x1ff == LDG else 1       # of a load: 32, 64, 128 bits
        first = low >> 16 & 0xff
        read = {low >> 24 & 0xff, low >> 32 & 0xff, high & 0xff} - {0xff}
        board = control >> 5 & 7
        yield at, opcode, read, {first + i for i in range(width)}, None if board == 7 else board, control >> 11 & 0x3f


def early_waits(code):
    """(address of the wait, of the load that is wanted, how many others, how many instructions before it)"""
    pending, count = [[] for _ in range(6)], 0
    for at, opcode, read, written, board, waits in instructions(code):
        count += 1
        for i in range(6):
            if not waits >> i & 1:
                continue
            wanted = [load for load in pending[i] if load[2] & read]
            behind = [load for load in pending[i] if wanted and load[0] > wanted[-1][0] and count - load[0] < NEAR]
            if behind and wanted[-1][0] - wanted[0][0] < NEAR < behind[-1][0] - wanted[-1][0]:
                yield at, wanted[-1][1], len(behind), count - behind[-1][0]
            pending[i] = []
        if board is not None and opcode & 0x1ff == LDG:
            pending[board].append((count, at, written))


def images():
    if len(sys.argv) > 1:
        return [Path(name) for name in sys.argv[1:]]
    rows = json.loads((ROOT / "build" / "kernels.json").read_text())["kernels"]
    return [ROOT / row["gpu"]["cubin"] for row in rows if row.get("gpu") and row["gpu"].get("cubin")]


def main():
    for path in images():
        for name, (code, _) in sections(path.read_bytes()).items():
            if name.startswith(".text."):
                for at, load, others, before in early_waits(code):
                    print(f"{name[6:]}: {at:#x} wants {load:#x}, and waits for {others} more, the last {before} before it")


if __name__ == "__main__":
    main()
