"""Build of Margay: the sets in the rows of csrc/*/kernels.def are written out. Every kernel that they name becomes one
GPU image and one CPU object per instruction set (a GPU_ONLY one only the base object, for its description; a CPU_ONLY
one no image). These, the runtime and the module are linked into margay/_C.abi3.so, and without the module into
build/libmargay.a for C programs. Never imports torch.

Environment
  MARGAY_CUDA   auto (default): GPU kernels where nvcc is found; 0: never; 1: fail without nvcc
  NVCC          the nvcc to use; otherwise $CUDA_HOME/bin/nvcc, the PATH, /usr/local/cuda
  CC, CXX       host compilers (default cc, c++); CFLAGS is added to the flags of the C files
  MAX_JOBS      compilations at a time (default: the cores of this process)
  MARGAY_ROWS   regular expression: build only the kernels whose whole name matches, for work on one of them
"""
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC, BUILD = Path("csrc"), Path("build")         # relative: commands run in ROOT, so that no path of this machine gets
                                                  # into an object
CACHE, GENERATED = BUILD / "cache", BUILD / "generated"
LIMITED_API = "0x030A0000"
NVCC_AT_LEAST = (12, 8)                           # the first with --compress-mode=size
X86 = platform.machine() in ("x86_64", "AMD64")
ISAS = {"base": []}
if X86:
    ISAS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    ISAS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma", "-mf16c",
                      "-mprefer-vector-width=512"]
SECTIONS = ["-fPIC", "-fvisibility=hidden", "-ffunction-sections", "-fdata-sections", "-fno-ident"]
C_FLAGS = ["-std=c17", "-O2", "-Wall", "-Wextra", "-Wpedantic", *SECTIONS]
# -O3 makes kernels of the same speed two and a half times as large: it unrolls loops over tiles.
CPU_FLAGS = ["-x", "c++", "-std=c++17", "-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-fno-exceptions",
             "-fno-rtti", "-fno-threadsafe-statics", *SECTIONS]
GPU_FLAGS = ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas", "-v"]


def run(command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


# ---- rows of kernels.def: csrc/kernels.def says what they may say

DTYPES, PLACES = ("bf16", "fp16", "e4m3", "fp32"), ("ANY", "CPU_ONLY", "GPU_ONLY")
SET, PLACE = r"\{([^{}]*)\}", r"\*|\{[^{}]*\}"         # PLACE: of a set in the name


@dataclasses.dataclass
class Row:
    name: str
    op: str
    source: str
    dtype: str
    where: str
    when: str
    constants: str

    def defines(self):
        return [f"-DKERNEL={self.name}", f"-DELEM={self.dtype}", f"-DCONSTANTS={self.constants}"]

    def nvcc_defines(self):
        # nvcc takes a plain comma for the start of another macro
        return [define.replace(",", "\\,") for define in self.defines()]

    def file(self):
        """In its family's room, beside the rows: no two families have a file of one name."""
        found = sorted((ROOT / CSRC).glob(f"*/{self.source}.cu"))
        return found[0].relative_to(ROOT) if found else CSRC / f"{self.source}.cu"


def families():
    """The rooms whose rows csrc/kernels.def includes, in its order."""
    return re.findall(r'^#include "(\w+)/kernels.def"', (ROOT / CSRC / "kernels.def").read_text(), re.M)


def all_rows():
    return [row for family in families()
            for row in kernel_rows((ROOT / CSRC / family / "kernels.def").read_text(), f"{family}/kernels.def")]


def check_sizes(text, known, name="ops.def"):
    """Sizes of an ops.def are names of MG_SIZES. A number would compile, as the place of another size."""
    text = re.sub(r"//.*", "", text)
    for found in re.finditer(r"\b(?:OUT|OPTOUT|SAVE|WORK|IN|OPT|MAT)\((\w+), *\w+, *([^()]*)\)|\bLET\((\w+),", text):
        for size in words(found[3] or found[2]):
            if size not in known:
                line, argument = text.count("\n", 0, found.start()) + 1, found[1] or "LET"
                fixed = f"; of a fixed size LET says how large it is: LET(K, {size})" if size.isdigit() else ""
                raise SystemExit(f"{name}:{line}: {argument} has the size {size}, expected a name of MG_SIZES in "
                                 f"csrc/margay.h{fixed}")


def known_sizes():
    header = (ROOT / CSRC / "margay.h").read_text()
    return set(re.findall(r" X\((\w+)\)", re.search(r"#define MG_SIZES\(X\)(?:.*\\\n)*.*", header)[0]))


def kernel_rows(text, name="kernels.def"):
    """The rows, their sets written out."""
    text, rows = re.sub(r"//.*", "", text), []
    for found in re.finditer(r"^[ \t]*KERNEL\b.*?(?=^[ \t]*KERNEL\b|\Z)", text, re.M | re.S):
        row = " ".join(found[0].split())
        body = re.fullmatch(r"KERNEL\((.*)\)", row)
        fields = [field.strip() for field in re.split(r",(?![^{}]*\})", body[1], maxsplit=6)] if body else []
        try:
            if len(fields) != 7:
                raise ValueError("A row is KERNEL(name, op, source, element type, place, condition, constants), with "
                                 "at least one constant: a file that needs none may have the size of its tile there, "
                                 "COLUMNS=64")
            rows += written_out(Row(*fields))
        except ValueError as error:
            raise SystemExit(f"{name}:{text.count(chr(10), 0, found.start()) + 1}: {row[:120]}\n{error}") from None
    return rows


def words(text):
    return [word.strip() for word in text.split(",")]


def filled(pattern, text, values):
    """The text, with one value after the other in place of what the pattern finds."""
    values = iter(values)
    return re.sub(pattern, lambda _: next(values), text)


def written_out(row):
    """One row for each choice of values from the row's sets, as the compilers and dispatch.c take it."""
    with_sets = f"{row.dtype}, {row.constants}"
    sets, places = [words(values) for values in re.findall(SET, with_sets)], re.findall(PLACE, row.name)
    called = [values if place == "*" else words(place[1:-1]) for place, values in zip(places, sets)]
    if [*map(len, called)] != [*map(len, sets)] or len(places) != len(sets):
        raise ValueError(f"The name has to say where each of the row's {len(sets)} sets goes: * or as many words "
                         "in braces as the set has values")
    constants_of_sets = re.findall(r"(\w+)\s*=\s*\{", row.constants)
    rows = []
    for choice in itertools.product(*(range(len(values)) for values in sets)):
        name = filled(PLACE, row.name, [names[i] for names, i in zip(called, choice)])
        chosen = [values[i] for values, i in zip(sets, choice)]
        dtype, constants = filled(SET, with_sets, chosen).split(", ", 1)
        when = row.when
        for constant, value in zip(reversed(constants_of_sets), reversed(chosen)):
            when = re.sub(rf"\b{constant}\b", value, when)
        for field, value, accepted in (("element type", dtype, DTYPES), ("place", row.where, PLACES)):
            if value not in accepted:
                raise ValueError(f"{name}: {field} is {value}, expected one of {', '.join(accepted)}")
        if dtype == "fp32" and row.where == "GPU_ONLY":
            raise ValueError(f"{name}: the GPU has no kernels in fp32")
        on_cpu = {"dtype": "float", "where": "CPU_ONLY"} if dtype == "fp32" else {"dtype": dtype}
        rows.append(dataclasses.replace(row, name=name, when=when, constants=constants, **on_cpu))
    if not (ROOT / row.file()).is_file():
        raise ValueError(f"There is no {row.file()}")
    return rows


# ---- what a compilation depends on

@functools.cache                                  # thousands of jobs ask for the same files
def includes(file):
    """What it includes in quotes, where that is a file of ours."""
    names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', (ROOT / file).read_text(), re.M)
    places = ((file.parent / name, CSRC / name, GENERATED / name) for name in names)
    found = (next((path for path in paths if (ROOT / path).is_file()), None) for paths in places)
    return [Path(os.path.normpath(path)) for path in found if path]


@functools.cache
def digest(file):
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()


def dependencies(source, *skip):
    """The file and all files it includes in quotes, transitively, but for the folders `skip` (the other backends')."""
    seen, todo = set(), [source]
    while todo:
        file = todo.pop()
        seen.add(file)
        todo += [found for found in includes(file) if found not in seen and not set(skip) & set(found.parents)]
    return sorted(seen)


@dataclasses.dataclass
class Job:
    """One compilation. Its result lives in the cache under a hash of everything that decides it; '{out}' in `commands`
    is that path without suffix, `suffixes` are the files that are kept, the last of them says that the job is done."""
    label: str
    sources: list
    commands: list
    suffixes: list
    tool: str                                     # the compiler's version text
    extra: str = ""                               # further content to hash

    def __post_init__(self):
        content = [self.tool, json.dumps(self.commands), self.extra]
        for file in self.sources:
            content += [str(file), digest(file)]
        self.key = hashlib.sha256("\0".join(content).encode()).hexdigest()[:24]

    def path(self, suffix=None):
        return CACHE / (self.key + (suffix or self.suffixes[-1]))

    def done(self):
        return (ROOT / self.path()).exists()

    def run(self):
        start, out, log = time.monotonic(), f"{CACHE / self.key}.{os.getpid()}", ""
        for command in self.commands:
            command = [word.replace("{out}", out) for word in command]
            result = run(command)
            log += result.stdout + result.stderr
            if result.returncode:
                raise SystemExit(f"{self.label}: failed\n{shlex.join(command)}\n{excerpt(log)}")
        (ROOT / f"{out}.log").write_text(log)
        for suffix in [".log", *self.suffixes]:
            os.replace(ROOT / (out + suffix), ROOT / self.path(suffix))
        return time.monotonic() - start


def excerpt(log, lines=60, columns=400):
    """Compilers quote whole macros: the beginning of the beginning is enough."""
    return "\n".join(line[:columns] for line in log.splitlines()[:lines])


def compile_all(*stages):
    """The jobs of a stage side by side, and all of them before those of the next."""
    stale = [{job.key: job for job in jobs if not job.done()} for jobs in stages]
    total = sum(map(len, stages))
    done = total - sum(map(len, stale))
    print(f"{done} of {total} up to date", flush=True)
    workers = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    for jobs in stale:
        with ThreadPoolExecutor(workers) as pool:
            running = {pool.submit(job.run): job for job in jobs.values()}
            try:
                for future in as_completed(running):
                    done += 1
                    print(f"[{done}/{total}] {running[future].label} {future.result():.1f} s{spills(running[future])}",
                          flush=True)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def spills(job):
    """What a GPU image keeps in local memory because registers do not suffice, for the line of its row."""
    if ".cubin" not in job.suffixes:
        return ""
    report = ptxas_report((ROOT / job.path(".log")).read_text())
    return (f", SPILLS: {report['spill_stores']} bytes stored, {report['spill_loads']} loaded"
            if report["spill_stores"] or report["spill_loads"] else "")


# ---- compilers

@dataclasses.dataclass
class Cuda:
    nvcc: str = ""
    fatbinary: str = ""
    version: str = ""
    reason: str = ""                              # why GPU kernels are not built; empty when they are


def find_cuda():
    wish = os.environ.get("MARGAY_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        raise SystemExit(f"MARGAY_CUDA is {wish!r}, expected auto, 0 or 1")
    cuda = Cuda(reason="MARGAY_CUDA=0") if wish == "0" else probe_nvcc()
    if wish == "1" and cuda.reason:
        raise SystemExit(f"MARGAY_CUDA=1, but {cuda.reason}")
    return cuda


def probe_nvcc():
    home = os.environ.get("CUDA_HOME")
    candidates = [os.environ.get("NVCC"), home and f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"]
    nvcc = next(filter(None, (shutil.which(name) for name in candidates if name)), None)
    if not nvcc:
        return Cuda(reason="nvcc was not found (NVCC, CUDA_HOME, PATH, /usr/local/cuda)")
    version = run([nvcc, "--version"]).stdout
    release = re.search(r"release (\d+)\.(\d+)", version)
    if not release or tuple(map(int, release.groups())) < NVCC_AT_LEAST:
        return Cuda(reason=f"{nvcc} is older than CUDA {'.'.join(map(str, NVCC_AT_LEAST))}")
    top = re.search(r"TOP=(.+)", run([nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"]).stderr)
    if not top:
        return Cuda(reason=f"{nvcc} --dryrun does not say where its toolkit is")
    top = os.path.normpath(top.group(1))
    return Cuda(nvcc, f"{top}/bin/fatbinary", version)


@functools.cache
def host_compiler(variable, default):
    compiler = os.environ.get(variable, default).split()
    if not shutil.which(compiler[0]):
        raise SystemExit(f"no compiler: {compiler[0]} was not found; set {variable}")
    return compiler, run([*compiler, "--version"]).stdout


# ---- jobs

def gpu_job(row, cuda):
    compile_ = [cuda.nvcc, *GPU_FLAGS, f"-I{CSRC}", *row.nvcc_defines(), "-o", "{out}.cubin", str(row.file())]
    pack = [cuda.fatbinary, "--create={out}.fatbin", "-64", "--compress-all", "--compress-mode=size",
            "--image3=kind=elf,sm=90a,file={out}.cubin"]
    return Job(f"{row.name} sm90", dependencies(row.file(), CSRC / "tile" / "cpu", CSRC / "tile" / "check"),
               [compile_, pack], [".cubin", ".fatbin"], cuda.version)


def cpu_flags(row, isa):
    # What describes the GPU's kernel is data; beside AVX2 the baseline is for machines that nobody has: small.
    seldom_runs = ["-Os"] if row.where == "GPU_ONLY" or (X86 and isa == "base") else []
    return (*CPU_FLAGS, *seldom_runs, *ISAS[isa], f"-I{CSRC}")


def vocabulary_job(flags):
    """The tile vocabulary as a precompiled header, because it would take more than half of most rows' compilations.
    Where it does not fit, GCC reads the text beside it. Other compilers do without: None."""
    cxx, version = host_compiler("CXX", "c++")
    if "Free Software Foundation" not in version:
        return None
    text = GENERATED / "vocabulary.h"
    if not (ROOT / text).exists():
        write(text, '#include "tile/vocabulary.h"\n')
    isa = next(isa for isa in reversed(ISAS) if {*ISAS[isa]} <= {*flags})
    commands = [["cp", str(text), "{out}.h"], [*cxx, *flags, "-x", "c++-header", "-c", "-o", "{out}.h.gch", str(text)]]
    return Job(f"tile vocabulary {isa}", dependencies(text, CSRC / "tile" / "sm90", CSRC / "tile" / "check"),
               commands, [".h", ".h.gch"], version)


def cpu_job(row, isa, vocabulary=None):
    cxx, version = host_compiler("CXX", "c++")
    known = ["-include", str(vocabulary.path(".h"))] if vocabulary else []
    command = [*cxx, *cpu_flags(row, isa), *known, *row.defines(), f"-DISA={isa}", "-c", "-o", "{out}.o",
               str(row.file())]
    return Job(f"{row.name} {isa}", dependencies(row.file(), CSRC / "tile" / "sm90", CSRC / "tile" / "check"),
               [command], [".o"], version)


def c_job(source, cuda, *includes):
    cc, version = host_compiler("CC", "cc")
    flags = [*C_FLAGS, *os.environ.get("CFLAGS", "").split(), *includes, f"-I{CSRC}", f"-I{GENERATED}"]
    flags += [f"-DPy_LIMITED_API={LIMITED_API}"]
    flags += [] if cuda.reason else ["-DMARGAY_CUDA=1"]
    flags += ["-DMARGAY_X86=1"] if X86 else []
    sources = dependencies(source, CSRC / "tile" / "sm90")
    return Job(str(source), sources, [[*cc, *flags, "-c", "-o", "{out}.o", str(source)]], [".o"], version)


IMAGE = """.section .rodata.{name}_image, "a", @progbits
.balign 64
.globl {name}_image, {name}_image_end
.hidden {name}_image, {name}_image_end
{name}_image: .incbin "{path}"
{name}_image_end: .byte 0
"""


def images_job(images):
    cc, version = host_compiler("CC", "cc")
    source = GENERATED / "images.S"
    text = "".join(IMAGE.format(name=row.name, path=job.path()) for row, job in images)
    text += '.section .note.GNU-stack, "", @progbits\n'
    write(source, text)
    return Job(str(source), [source], [[*cc, "-c", "-o", "{out}.o", str(source)]], [".o"], version)


def write(path, text):
    (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
    temporary = ROOT / f"{path}.{os.getpid()}"
    temporary.write_text(text)
    os.replace(temporary, ROOT / path)


# ---- what the compilers said about the kernels, for tests and for people

def ptxas_report(log):
    report = {"warnings": sorted(set(re.findall(r"\((C75\d\d)\)", log)))}
    for key, pattern in {"registers": r"Used (\d+) registers", "stack": r"(\d+) bytes stack frame",
                         "spill_stores": r"(\d+) bytes spill stores",
                         "spill_loads": r"(\d+) bytes spill loads", "static_shared": r"(\d+) bytes smem"}.items():
        report[key] = max(map(int, re.findall(pattern, log)), default=0)
    return report


def write_report(rows, images, c_jobs, cuda):
    gpu = {row.name: job for row, job in images}
    kernels = []
    for row in rows:
        entry = dataclasses.asdict(row)
        if row.name in gpu:
            job = gpu[row.name]
            log = (ROOT / job.path(".log")).read_text()
            write(job.path(".ptxas"), log)
            entry["gpu"] = {**ptxas_report(log), "cubin": str(job.path(".cubin")),
                            "fatbin_bytes": (ROOT / job.path()).stat().st_size}
        kernels.append(entry)
    warnings = {job.label: log for job in c_jobs if (log := (ROOT / job.path(".log")).read_text().strip())}
    write(BUILD / "kernels.json", json.dumps({"cuda": not cuda.reason, "reason": cuda.reason,
                                              "kernels": kernels, "warnings": warnings}, indent=1))


# ---- the extension

class Build(build_ext):
    def build_extension(self, ext):
        include = sysconfig.get_paths()["include"]
        if not os.path.exists(f"{include}/Python.h"):
            raise SystemExit(f"{include}/Python.h is missing: install the development files of this Python "
                             "(python3-dev)")
        (ROOT / CACHE).mkdir(parents=True, exist_ok=True)
        cuda = find_cuda()
        objects, module = compile_everything(cuda, f"-I{include}")
        link(objects, module, self.get_ext_fullpath(ext.name))
        print("CPU only: " + cuda.reason if cuda.reason else "with CUDA kernels for sm_90a", flush=True)


def compile_everything(cuda, python_include):
    """Returns the objects of the library and the object of the Python module."""
    for family in families():
        check_sizes((ROOT / CSRC / family / "ops.def").read_text(), known_sizes(), f"{family}/ops.def")
    wanted = re.compile(os.environ.get("MARGAY_ROWS") or ".*")
    rows = [row for row in all_rows() if wanted.fullmatch(row.name)]
    if not rows:
        raise SystemExit(f"MARGAY_ROWS={wanted.pattern} matches no kernel (it has to match a whole name)")
    write(GENERATED / "kernel_rows.def", "".join(f"KERNEL({', '.join(dataclasses.astuple(row))})\n" for row in rows))
    images = [] if cuda.reason else [(row, gpu_job(row, cuda)) for row in rows if row.where != "CPU_ONLY"]
    on_cpu = [(row, isa) for row in rows for isa in ISAS if isa == "base" or row.where != "GPU_ONLY"]
    vocabularies = {flags: vocabulary_job(flags) for flags in dict.fromkeys(cpu_flags(*choice) for choice in on_cpu)}
    cpu = [cpu_job(*choice, vocabularies[cpu_flags(*choice)]) for choice in on_cpu]
    sources = sorted(path.relative_to(ROOT) for folder in ("runtime", *families())
                     for path in (ROOT / CSRC / folder).glob("*.c"))
    library = [c_job(source, cuda) for source in sources]
    module = c_job(CSRC / "module.c", cuda, python_include)
    headers = [job for job in vocabularies.values() if job]
    compile_all([*headers, *library, module], [*(job for _, job in images), *cpu])
    forget_headers(headers)
    tables = images_job(images)
    if not tables.done():
        tables.run()
    write_report(rows, images, [*library, module], cuda)
    return [job.path() for job in [*library, *cpu, tables]], module.path()


def forget_headers(current):
    """Precompiled headers of earlier sources: 40 MB each."""
    for path in {*(ROOT / CACHE).glob("*.h.gch")} - {ROOT / job.path() for job in current}:
        path.unlink(missing_ok=True)


# glibc 2.34 moved these from libpthread and libdl into libc, under new versions beside the old ones. A link against
# stubs of the two libraries as they were asks for the old versions, which every glibc has: the extension then runs with
# an older glibc than that of this machine.
STUBS = {
    "libpthread.so.0": ("pthread_create", "pthread_detach", "pthread_key_create", "pthread_once", "pthread_setspecific",
                        "pthread_sigmask"),
    "libdl.so.2": ("dlclose", "dlerror", "dlopen", "dlsym"),
}
OLDEST_VERSION = {"x86_64": "GLIBC_2.2.5", "aarch64": "GLIBC_2.17"}


def glibc_stubs(cc):
    """Files to link before libc; none where the C library is another."""
    version = OLDEST_VERSION.get(platform.machine())
    if platform.libc_ver()[0] != "glibc" or not version:
        return []
    stubs = []
    for name, functions in STUBS.items():
        source, exports, target = GENERATED / f"{name}.S", GENERATED / f"{name}.map", GENERATED / name
        write(source, "".join(f".globl {f}\n.type {f}, %function\n{f}: .byte 0\n" for f in functions)
              + '.section .note.GNU-stack, "", %progbits\n')
        write(exports, f"{version} {{ global: {'; '.join(functions)}; local: *; }};\n")
        run_linker(target, [*cc, "-shared", "-nostdlib", "-o", "{out}", str(source), f"-Wl,-soname,{name}",
                            f"-Wl,--version-script={exports}"])
        stubs.append(str(target))
    return stubs


def one_of_equals(cc):
    """Options of a linker that keeps one of functions with equal instructions, if there is one. Kernels for the CPU have
    many: a seventh of the extension. No address of a function is compared with another's."""
    options = ["-fuse-ld=gold", "-Wl,--icf=all"]
    return options if platform.system() == "Linux" and not run([*cc, *options, "-Wl,--version"]).returncode else []


def link(objects, module, target):
    cc, _ = host_compiler("CC", "cc")
    exports = GENERATED / "exports.map"
    write(exports, "{ global: PyInit__C; local: *; };\n")
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    run_linker(target, [*cc, "-shared", "-o", "{out}", str(module), *map(str, objects),
                        *one_of_equals(cc), "-Wl,--gc-sections", "-Wl,--as-needed",
                        "-Wl,-z,noexecstack", "-Wl,-z,relro", "-Wl,-z,now",
                        f"-Wl,--version-script={exports}", *glibc_stubs(cc),
                        "-lm", "-lpthread", "-ldl"])
    run_linker(ROOT / BUILD / "libmargay.a", ["ar", "rcsD", "{out}", *map(str, objects)])


def run_linker(output, command):
    temporary = f"{(ROOT / output).resolve()}.{os.getpid()}"
    result = run([word.replace("{out}", temporary) for word in command])
    if result.returncode:
        raise SystemExit(f"{output}: linking failed\n{result.stderr}")
    os.replace(temporary, ROOT / output)


# ---- the wheel

def glibc_needed(path):
    """The newest version of glibc that a linked file asks for, as (2, minor); None where it asks for none."""
    text = run(["readelf", "--wide", "--version-info", str(path)]).stdout
    return max((tuple(map(int, v.split("."))) for v in re.findall(r"Name: GLIBC_(\d+\.\d+)", text)), default=None)


class Wheel(bdist_wheel):
    """The platform's tag says what the linked extension needs, not what this machine has."""

    def get_tag(self):
        python, abi, plat = super().get_tag()
        extension = self.get_finalized_command("build_ext").get_ext_fullpath("margay._C")
        glibc = glibc_needed(extension)
        if self.plat_name_supplied or not glibc or not plat.startswith("linux_"):
            return python, abi, plat
        machine = plat.removeprefix("linux_")
        return python, abi, f"manylinux_2_{max(glibc[1], 17)}_{machine}"        # 2_17 is the oldest that pip knows


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(ROOT)
    setup(ext_modules=[Extension("margay._C", sources=[], py_limited_api=True)],
          cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
          options={"bdist_wheel": {"py_limited_api": "cp310"}})
