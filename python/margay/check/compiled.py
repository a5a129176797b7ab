"""A kernel file compiled for the checker: build, cache, run, and what its addresses and offsets mean."""

import bisect
import ctypes
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve()
MUTATIONS = ("none", "drop", "double", "phase", "bytes more", "bytes less",
             "count more", "count less", "group less", "stage", "early", "fence late")
OPS = ("init", "wait", "arrive", "expect", "bar_sync", "bar_arrive", "wg_sync",
       "fence_async", "mma_fence", "mma_commit", "mma_wait", "store_wait",
       "order_wait", "order_pass", "order_count", "load", "store", "product", "atomic", "grid_wait")
RULES = ("uninitialised", "race", "overwrite", "fence", "fence-read", "in-flight",
         "unnamed", "mma-fence", "count", "bytes", "exit", "barrier", "deadlock",
         "bounds", "lifetime", "init", "global-race", "crash", "elected", "phase", "grid")
FLAGS = ["-O1", "-g1", "-fPIC", "-fasynchronous-unwind-tables", "-Wall", "-Wextra",
         "-Wno-unused-function", "-Wno-invalid-offsetof"]
REPORT_BYTES = 1 << 16
MAX_EVENTS = 1 << 18
MAX_TOLD = 1 << 16


def csrc():
    """The folder of the kernel sources."""
    for folder in (Path(os.environ.get("MARGAY_CSRC", "")), HERE.parents[3] / "csrc", Path("csrc").resolve()):
        if (folder / "tile" / "tile.h").is_file() and (folder / "check" / "engine.c").is_file():
            return folder.resolve()
    raise SystemExit("margay.check: the sources (csrc) are not beside the package; run it in the repository or set "
                     "MARGAY_CSRC")


def cache():
    root = csrc().parent / "build"
    return (root if root.is_dir() else Path(tempfile.gettempdir()) / f"margay-{os.getuid()}") / "check"


TOOLS = {"CC": ("a C compiler", "gcc", "cc"), "CXX": ("a C++ compiler", "g++", "c++"),
         "LD": ("a linker (binutils)", "ld"), "NM": ("nm (binutils)", "nm"),
         "ADDR2LINE": ("addr2line (binutils)", "addr2line")}


def tool(variable):
    what, *names = TOOLS[variable]
    asked = os.environ.get(variable)
    found = next(filter(None, map(shutil.which, asked.split()[:1] if asked else names)), None)
    if not found:
        raise SystemExit(f"margay.check: needs {what}: {asked or ' or '.join(names)} was not found; {variable} "
                         "names another")
    return asked or found


# ---- the source text

def without_comments(text):
    return re.sub(r"/\*.*?\*/", "", re.sub(r"//[^\n]*", "", text), flags=re.S)


def split_top(text):
    """Split at commas that are in no brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "<([{") - (char in ">)]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def members(text):
    """Names of the members of `struct shared`."""
    body = re.search(r"struct shared\s*\{(.*?)\n?\};", without_comments(text), re.S)
    names = []
    for line in body[1].split(";") if body else ():
        declaration = re.match(r"\s*[\w:]+\s*(?:<.*>)?\s+(.+)", line.strip(), re.S)
        for part in split_top(declaration[1]) if declaration else ():
            names.append(re.match(r"\s*(\w+)", part)[1])
    return names


def role_names(text):
    """Functions of the roles in the order of block<...>."""
    return re.findall(r"\brole<\s*(\w+)", without_comments(text))


def options_in(text):
    """The line `// margay.check: bf16 NAME=value, ...` of a file that is no row of kernels.def."""
    found = re.search(r"^// margay\.check:[ \t]*(bf16|fp16|e4m3|float)\b[ \t]*(.*?)[ \t]*$", text, re.M)
    return (found[1], found[2]) if found else None


# ---- building

@functools.cache
def runtime_object():
    """The checker's runtime as one object file."""
    sources = [csrc() / "check" / name for name in ("engine.c", "sync.c", "async.c", "shadow.c", "report.c")]
    text = b"".join(path.read_bytes() for path in [*sources, csrc() / "check" / "check.h",
                                                   csrc() / "check" / "engine.h"])
    out = cache() / f"runtime-{hashlib.sha256(text).hexdigest()[:16]}.o"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as work:
            for source in sources:
                run([tool("CC"), "-std=gnu17", "-O2", "-g1", "-fPIC", "-Wall",
                     "-Wextra", f"-I{csrc()}", "-c", source, "-o", f"{work}/{source.stem}.o"])
            run([tool("LD"), "-r", *(f"{work}/{source.stem}.o" for source in sources), "-o", f"{work}/all.o"])
            os.replace(f"{work}/all.o", out)
    return out


def run(command, doing=""):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if result.returncode:
        errors = [line[:300] for line in (result.stderr or result.stdout).splitlines()
                  if not doing or " error: " in line or "reduces to" in line]
        raise SystemExit("\n".join([f"margay.check: {doing or ' '.join(map(str, command))}", *errors[:20]]))
    return result.stdout


def included(source):
    """The file and what it includes in quotes, transitively."""
    seen, todo = [], [source]
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.append(file)
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', file.read_text(), re.M):
            todo += [found.resolve() for found in (file.parent / name, csrc() / name) if found.is_file()][:1]
    return sorted(seen)


def checking():
    """Flags of every kernel's compilation."""
    native = ["-march=native"] if platform.machine() == "x86_64" else []
    return ["-std=gnu++17", *FLAGS, *native, "-fno-exceptions", "-fno-rtti", f"-I{csrc()}", "-DCHECK"]


@functools.cache
def vocabulary():
    """What to include for the tile vocabulary as a precompiled header, because it would take more than half of a
    kernel's compilation. Where it does not fit, GCC reads the text beside it. Other compilers do without: None."""
    if "Free Software Foundation" not in run([tool("CXX"), "--version"]):
        return None
    source = csrc() / "tile" / "vocabulary.h"
    key = hashlib.sha256(repr((tool("CXX"), checking())).encode() + b"".join(map(Path.read_bytes, included(source))))
    out = cache() / f"vocabulary-{key.hexdigest()[:16]}.h"
    precompiled = out.with_name(f"{out.name}.gch")
    if not precompiled.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        for older in out.parent.glob("vocabulary-*.gch"):      # 40 MB each
            older.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as work:
            text = Path(work) / out.name
            text.write_text('#include "tile/vocabulary.h"\n')
            run([tool("CXX"), *checking(), "-x", "c++-header", text, "-o", f"{work}/out.gch"])
            os.replace(text, out)
            os.replace(f"{work}/out.gch", precompiled)
    return out


def build(source, dtype, constants):
    """Path of the library; compiled unless it was before."""
    text = source.read_text()
    key = hashlib.sha256(repr((checking(), dtype, constants)).encode() +
                         b"".join(map(Path.read_bytes, included(source))) + runtime_object().name.encode())
    out = cache() / f"{source.stem}-{key.hexdigest()[:16]}.so"
    if not out.exists():
        fields = " ".join(f"FIELD({name})" for name in members(text))
        known = ["-include", vocabulary()] if vocabulary() else []
        with tempfile.TemporaryDirectory(dir=out.parent) as work:
            run([tool("CXX"), *checking(), "-shared", "-x", "c++", *known,
                 "-DKERNEL=checked", "-DISA=check", f"-DELEM={dtype}", f"-DCONSTANTS={constants}",
                 f"-DFIELDS={fields}", source, "-x", "none",
                 runtime_object(), "-Wl,-Bsymbolic", "-o", f"{work}/out.so"],
                f"{source.name} ({dtype}, {constants}) does not compile:")
            os.replace(f"{work}/out.so", out)
    return out


# ---- the library

class Request(ctypes.Structure):
    _fields_ = [("seed", ctypes.c_uint64), ("rules_off", ctypes.c_uint32), ("mutation", ctypes.c_uint32),
                ("sites", ctypes.c_void_p),
                ("site_count", ctypes.c_int), ("ordered", ctypes.c_int32),
                ("told_count", ctypes.c_int32), ("told", ctypes.c_void_p)]


class Told(ctypes.Structure):
    _fields_ = [("p", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("mark", ctypes.c_void_p)]


class Event(ctypes.Structure):
    _fields_ = [("pc", ctypes.c_void_p), ("op", ctypes.c_int32), ("fiber", ctypes.c_int32), ("block", ctypes.c_int32),
                ("offset", ctypes.c_int32), ("value", ctypes.c_int32)]


class Field(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("offset", ctypes.c_size_t), ("size", ctypes.c_size_t),
                ("element", ctypes.c_size_t), ("kind", ctypes.c_int),
                ("stages", ctypes.c_int)]


class Role(ctypes.Structure):
    _fields_ = [("body", ctypes.c_void_p), ("role", ctypes.c_int), ("index", ctypes.c_int), ("width", ctypes.c_int)]


class KernelDescription(ctypes.Structure):
    _fields_ = [("shared_bytes", ctypes.c_size_t), ("stride", ctypes.c_size_t),
                ("cluster", ctypes.c_int), ("fibers", ctypes.c_int),
                ("dependent", ctypes.c_int), ("role", Role * 64)]


class Descriptor(ctypes.Structure):
    """The beginning of mg_kernel_desc."""
    _fields_ = [(name, ctypes.c_uint32) for name in ("shared_bytes", "threads",
                                                     "cluster", "blocks_per_sm", "params_bytes")]


class Frame(tuple):
    """One line of source: (function, file, line). `inner` frames belong to the vocabulary."""
    function, file, line = (property(lambda self, i=i: self[i]) for i in range(3))

    @property
    def inner(self):
        return "/tile/" in self.file

    def place(self):
        return f"{os.path.basename(self.file)}:{self.line}"


class Kernel:
    """A kernel file with its constants, ready to be checked. `run` checks one launch."""

    def __init__(self, source, dtype, constants, name=None, ordered=None):
        self.source, self.name = Path(source).resolve(), name or Path(source).stem
        self.constants = dict(re.findall(r"(\w+)\s*=\s*(-?\w+)", constants))
        self.path = build(self.source, dtype, constants)
        self.roles = role_names(self.source.read_text())
        self.library = ctypes.CDLL(str(self.path))
        self.library.mg_check_fields.restype = ctypes.POINTER(Field)
        self.library.ck_steps.restype = ctypes.c_long
        self.text = ctypes.create_string_buffer(REPORT_BYTES)
        self.fields = self.read_fields()
        self.descriptor = Descriptor.in_dll(self.library, "mg_check_desc")
        self.has_example = hasattr(self.library, "mg_check_example")
        self.members = self.read_members()                   # (name, threads) of a block's role members, in the order
                                                             # of the checker's fibers
        self.ordered = self.constants.get("DETERMINISTIC") == "1" if ordered is None else ordered
        self.chains = {}

    def read_fields(self):
        found = self.library.mg_check_fields()
        fields = []
        while found[len(fields)].name:
            fields.append(found[len(fields)])
        return fields

    def read_members(self):
        self.library.mg_check_kernel.restype = ctypes.POINTER(KernelDescription)
        found = self.library.mg_check_kernel().contents
        self.cluster = found.cluster
        return [(f"{self.roles[role.role]}[{role.index}]", role.width) for role in found.role[:found.fibers]]

    def run(self, params, blocks, seed, mutation=0, sites=(), rules_off=0, told=()):
        """None if nothing is wrong, else the report as a dictionary. told: what told() was of the kernel in front."""
        addresses = (ctypes.c_void_p * max(1, len(sites)))(*sorted(sites))
        request = Request(seed, rules_off, mutation, ctypes.cast(addresses, ctypes.c_void_p), len(sites), self.ordered,
                          len(told), ctypes.cast(told, ctypes.c_void_p) if told else None)
        failed = self.library.mg_check_run(ctypes.byref(request), ctypes.c_void_p(params),
                                           int(blocks), self.text, REPORT_BYTES)
        if not failed:
            return None
        found = json.loads(self.text.value)
        if "stack" in found:                                  # of a crash, the innermost line of the kernel's text
            self.resolve(found["stack"])
            found["pc"] = next(filter(self.where, found["stack"]), 0)
        return found

    def told(self):
        """What the last run told a kernel behind it."""
        told = (Told * MAX_TOLD)()
        return (Told * min(self.library.ck_told_of(told, MAX_TOLD), MAX_TOLD)).from_buffer(told)

    def run_example(self, seed, **options):
        """The problem that the file itself describes with EXAMPLE."""
        if not self.has_example:
            raise SystemExit(f"margay.check: {self.source.name} is no row of kernels.def and has no EXAMPLE(...), see "
                             "docs/protocol.md")
        self.library.mg_check_example.restype = ctypes.c_void_p
        blocks = ctypes.c_int()
        params = self.library.mg_check_example(ctypes.byref(blocks))
        return self.run(params, blocks.value, seed, **options)

    def events(self):
        events = (Event * MAX_EVENTS)()
        count = min(self.library.ck_events(events, MAX_EVENTS), MAX_EVENTS)
        return events[:count]

    # -- names

    def place(self, offset):
        """What lies at an offset of the block's struct: `k[1]`, `v_ring.full[0]`."""
        i = bisect.bisect_right([field.offset for field in self.fields], offset) - 1
        if offset < 0 or i < 0:
            return None
        field = self.fields[i]
        rest = offset - field.offset
        if rest >= field.size:
            return f"offset {offset}"
        name, index = field.name.decode(), rest // field.element
        if field.size > field.element:
            name += f"[{index}]"
        rest %= field.element
        if field.kind == 1:                                  # ring: full[S], empty[S]
            return f"{name}.{'full' if rest < 8 * field.stages else 'empty'}[{rest // 8 % field.stages}]"
        if field.kind == 2:                                  # task_queue: id[2], full[2], empty[2]
            return (f"{name}.id[{rest // 4}]" if rest < 8
                    else f"{name}.{'full' if rest < 24 else 'empty'}[{(rest - 8) // 8 % 2}]")
        return name

    def chain(self, address):
        """Frames of an address, the innermost first."""
        if address not in self.chains:
            self.resolve([address])
        return self.chains[address]

    def resolve(self, addresses):
        wanted = sorted({a for a in addresses if a and a not in self.chains})
        if not wanted:
            return
        base = ctypes.cast(self.library.mg_check_run, ctypes.c_void_p).value - symbol_offset(self.path, "mg_check_run")
        text = subprocess.run([tool("ADDR2LINE"), "-a", "-i", "-f", "-C", "-e", str(self.path)],
                              input="\n".join(hex(a - base - 1) for a in wanted),
                              capture_output=True, text=True, check=True).stdout
        for address, block in zip(wanted, re.split(r"^0x[0-9a-f]+\n", text, flags=re.M)[1:]):
            lines = block.splitlines()
            self.chains[address] = tuple(frame_of(name, *split_line(place))
                                         for name, place in zip(lines[::2], lines[1::2]))

    def where(self, address):
        """(`file:line` in the kernel, operation, function) of an address."""
        chain = self.chain(address)
        outer = [i for i, frame in enumerate(chain) if not frame.inner]
        if not outer:
            return None
        i = outer[0]
        # What an instruction between calls is said to belong to
        name = lambda frame: frame.function.replace("role_body", "")
        return chain[i].place(), name(chain[i - 1]) if i else "", name(chain[i])

    def source_line(self, frame):
        """The text of a frame's line."""
        for path in (Path(frame.file), self.source.parent / Path(frame.file).name, csrc() / Path(frame.file).name):
            if path.is_file():
                lines = path.read_text().splitlines()
                return re.sub(r"\s*//.*", "", lines[frame.line - 1]).strip() if 0 < frame.line <= len(lines) else ""
        return ""

    def fiber(self, description):
        role, member = description["role"], description["member"]
        name = self.roles[role] if role < len(self.roles) else f"role {role}"
        return f"{name}[{member}] of block {description['block']}"

    def filled(self, report):
        """The report's text with names for its places and fibers."""
        def fiber(match):
            block, role, member = report["roles"][int(match[1])]
            return self.fiber({"block": block, "role": role, "member": member})
        text = re.sub(r"\{f:(\d+)\}", fiber, report["text"])
        return re.sub(r"\{s:(-?\d+)\}", lambda match: self.place(int(match[1])) or "?", text)


def frame_of(name, file, line):
    """The innermost function of an address has no name in the debug information. Its line of tile/check has it."""
    if "/tile/check/" in file and Path(file).is_file():
        found = re.findall(r"TILE \S+ (\w+)\(", "\n".join(Path(file).read_text().splitlines()[max(0, line - 5):line]))
        name = found[-1] if found else name
    return Frame((re.sub(r"[(<].*", "", name).split(" ")[-1], file, line))


def split_line(place):
    file, _, line = place.partition(" ")[0].rpartition(":")
    return file, int(line) if line.isdigit() else 0


@functools.cache
def symbol_offset(path, name):
    text = run([tool("NM"), "-D", path])
    return int(re.search(rf"^([0-9a-f]+) T {name}$", text, re.M)[1], 16)
