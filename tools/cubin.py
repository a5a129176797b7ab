"""What is in compiled kernels: registers, stack, spills, notes of ptxas, counts of instructions.

    python tools/cubin.py                the rows of the last build, from build/kernels.json
    python tools/cubin.py FILE.cubin     one image
"""
import json
import struct
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The low nine bits of sm_90's 128-bit instructions that say most about a kernel.
OPCODES = {0x1f0: "HGMMA", 0x1f3: "QGMMA", 0x03c: "HMMA", 0x1b4: "UTMALDG",
           0x1b7: "UTMASTG", 0x183: "LDL", 0x187: "STL", 0x181: "LDG", 0x186: "STG"}
REGCOUNT, FRAME_SIZE = 0x2f, 0x11                 # attributes in .nv.info
WITH_SIZE = 0x04                                  # format of an attribute whose value is `size` bytes long


def sections(image):
    """name -> (bytes, header fields) of an ELF64 file."""
    if image[:5] != b"\x7fELF\x02":
        raise ValueError("not an ELF64 file; fatbins are compressed, read the .cubin beside them")
    offset, = struct.unpack_from("<Q", image, 0x28)
    size, count, names_index = struct.unpack_from("<3H", image, 0x3a)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, offset + i * size) for i in range(count)]
    text = image[headers[names_index][4]:][:headers[names_index][5]]
    name = lambda at: text[at:text.index(b"\0", at)].decode()
    return {name(h[0]): (image[h[4]:h[4] + h[5]] if h[1] != 8 else b"", h) for h in headers}


def symbols(found):
    """Names by index of the symbol table."""
    table, strings = found[".symtab"][0], found[".strtab"][0]
    starts = [struct.unpack_from("<I", table, at)[0] for at in range(0, len(table), 24)]
    return [strings[at:strings.index(b"\0", at)].decode() for at in starts]


def attributes(found):
    """(attribute, symbol name) -> value, of the attributes that .nv.info gives per function."""
    info, names, values, at = found[".nv.info"][0], symbols(found), {}, 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind == WITH_SIZE:
            if size == 8:
                symbol, value = struct.unpack_from("<II", info, at)
                if symbol < len(names):
                    values[attribute, names[symbol]] = value
            at += size
    return values


def kernels(image):
    """kernel -> {registers, stack, instruction counts}"""
    found = sections(image)
    values = attributes(found)
    result = {}
    for section, (code, _) in found.items():
        if section.startswith(".text."):
            name = section.removeprefix(".text.")
            words = struct.unpack(f"<{len(code) // 8}Q", code)[::2]
            counts = Counter(OPCODES[op] for word in words if (op := word & 0x1ff) in OPCODES)
            result[name] = {"registers": values.get((REGCOUNT, name), 0), "stack": values.get((FRAME_SIZE, name), 0),
                            "instructions": len(words), **{op: counts[op] for op in OPCODES.values()}}
    return result


def rows():
    """The rows of the last build that have a GPU image: what ptxas and the image say of each."""
    path = ROOT / "build" / "kernels.json"
    if not path.exists():
        raise FileNotFoundError("build/kernels.json: nothing was built here yet")
    for row in json.loads(path.read_text())["kernels"]:
        if gpu := row.get("gpu"):
            (image,) = kernels((ROOT / gpu["cubin"]).read_bytes()).values()
            yield row["name"], {**gpu, **image}


def main():
    if len(sys.argv) > 1:
        found = [item for file in sys.argv[1:] for item in kernels(Path(file).read_bytes()).items()]
    else:
        found = list(rows())
    columns = [name for name in ("registers", "stack", "spill_stores", "spill_loads",
                                 "fatbin_bytes", "instructions", *OPCODES.values(), "warnings")
               if any(name in row for _, row in found)]
    width = max((len(name) for name, _ in found), default=0)
    print(" " * width, *columns)
    for name, row in found:
        values = [" ".join(row[c]) if c == "warnings" else str(row[c]) for c in columns]
        print(name.ljust(width), *(value.rjust(len(c)) for value, c in zip(values, columns)))


if __name__ == "__main__":
    main()
