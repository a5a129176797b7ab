"""python -m margay.bench FAMILY: times Margay against PyTorch on this machine and writes FAMILY-DEVICE.json."""
import argparse
import importlib.util
import math
from pathlib import Path

from margay import _needs

PROGRAM = "margay.bench"
FAMILIES = ("attention", "decode", "features", "gemm", "cpu", "overhead", "rows")
WITHOUT_GPU = ("cpu", "overhead")
RESULTS = Path("benchmarks/results")                  # of the repository, when it is the current folder


def parse():
    parser = argparse.ArgumentParser(prog="python -m margay.bench", description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches, for instance 'backward .* D=128'")
    parser.add_argument("--peers", default="", help="names of the peers to run, with commas; default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ms", type=float, default=20, help="length of one measurement")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case after this time")
    parser.add_argument("--out", type=Path, default=RESULTS if RESULTS.is_dir() else Path("."), help="folder of the result file")
    parser.add_argument("--plot", action="store_true", help="also write a PNG beside the result file")
    parser.add_argument("--threads", type=int, default=2, help="of the family cpu")
    parser.add_argument("--dims", type=lambda text: tuple(map(int, text.split(","))), default=(64, 128), help="head dims of the family attention")
    parser.add_argument("--dtype", default="bfloat16", help="of the family attention")
    parser.add_argument("--dtypes", type=lambda text: tuple(text.split(",")), default=("bfloat16", "float16"), help="of the family gemm")
    parser.add_argument("--layouts", type=lambda text: tuple(text.split(",")), default=("nn",), help="of the family gemm: nn, nt, tn, tt")
    parser.add_argument("--rows", default="", metavar="REGEX", help="rows that the family rows compares")
    return parser.parse_args()


def main():
    arguments = parse()
    _needs.torch(PROGRAM)
    if arguments.family not in WITHOUT_GPU:
        _needs.gpu(PROGRAM, f"the family {arguments.family}", "python -m margay.bench cpu")
    if arguments.plot and not importlib.util.find_spec("matplotlib"):
        _needs.stop(PROGRAM, "--plot needs matplotlib, which is not installed")
    arguments.out.mkdir(parents=True, exist_ok=True)
    from margay.bench import harness
    options = harness.Options(arguments.out, arguments.only, arguments.rounds, arguments.ms, arguments.seconds,
                              tuple(filter(None, arguments.peers.split(","))), arguments.plot)
    good = importlib.import_module(f"margay.bench.{arguments.family}").run(options, arguments)
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
