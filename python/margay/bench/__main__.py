"""python -m margay.bench NAME: times Margay against PyTorch on this machine and writes NAME-DEVICE.json."""
import argparse
import ast
import importlib.util
import math
from pathlib import Path

from margay import _needs

PROGRAM = "margay.bench"
RESULTS = Path("benchmarks/results")                  # of the repository, when it is the current folder


def benchmarks():
    """Every file with a function `run`: name -> (module, first line of its docstring). Read, not imported: --help needs
    no torch."""
    folder, found = Path(__file__).parent, {}
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.name):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            parts = path.relative_to(folder).with_suffix("").parts
            found[path.stem] = ".".join(("margay.bench", *parts)), ast.get_docstring(tree).splitlines()[0]
    return found


BENCHMARKS = benchmarks()


def parse():
    class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass
    names = "\n".join(f"  {name:<16} {what}" for name, (_, what) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(prog="python -m margay.bench", description=f"{__doc__}\n\n{names}",
                                     formatter_class=Help)
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", help="one of those above; (GPU): needs one")
    parser.add_argument("--only", default="", metavar="REGEX",
                        help="cases whose name matches, for instance 'backward .* D=128'")
    parser.add_argument("--peers", default="", help="names of the peers to run, with commas; none: all")
    parser.add_argument("--rounds", type=int, default=5, help="in each of which all runners are timed in turn")
    parser.add_argument("--ms", type=float, default=20, help="length of one measurement in milliseconds")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case after this time")
    parser.add_argument("--out", type=Path, default=RESULTS if RESULTS.is_dir() else Path("."),
                        help="folder of the result file")
    parser.add_argument("--plot", action="store_true", help="also write a PNG beside the result file")
    parser.add_argument("--threads", type=int, default=2, help="of cpu")
    parser.add_argument("--dims", type=lambda text: tuple(map(int, text.split(","))), default=(64, 128),
                        help="head dims of attention")
    parser.add_argument("--dtype", default="bfloat16", help="of attention")
    parser.add_argument("--dtypes", type=lambda text: tuple(text.split(",")), default=("bfloat16", "float16"),
                        help="of gemm")
    parser.add_argument("--layouts", type=lambda text: tuple(text.split(",")), default=("nn",),
                        help="of gemm: nn, nt, tn, tt")
    parser.add_argument("--rows", default="", metavar="REGEX", help="rows that rows compares")
    return parser.parse_args()


def main():
    arguments = parse()
    _needs.torch(PROGRAM)
    module, what = BENCHMARKS[arguments.name]
    if "(GPU)" in what:
        _needs.gpu(PROGRAM, f"the benchmark {arguments.name}", "python -m margay.bench cpu")
    if arguments.plot and not importlib.util.find_spec("matplotlib"):
        _needs.stop(PROGRAM, "--plot needs matplotlib, which is not installed")
    arguments.out.mkdir(parents=True, exist_ok=True)
    from margay.bench import harness
    options = harness.Options(arguments.out, arguments.only, arguments.rounds, arguments.ms, arguments.seconds,
                              tuple(filter(None, arguments.peers.split(","))), arguments.plot)
    good = importlib.import_module(module).run(options, arguments)
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
