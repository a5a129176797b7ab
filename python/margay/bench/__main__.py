"""python -m margay.bench FAMILY: times Margay against PyTorch on this machine and writes FAMILY-DEVICE.json."""
import argparse
import importlib.util
import math
from pathlib import Path

from margay import _needs

PROGRAM = "margay.bench"
FAMILIES = {
    "attention": "forward and backward, against cuDNN's and the flash attention of PyTorch's SDPA (GPU)",
    "decode": "one query a sequence over its cache, plain and paged, against SDPA (GPU)",
    "features": "grouped queries, windows, packed sequences, sinks, softcap, ALiBi, dropout, against dense attention of the same work (GPU)",
    "gemm": "matrix products against torch.mm, that is cuBLASLt (GPU)",
    "linear_attention": "forward and backward, against PyTorch's products in chunks (GPU)",
    "cpu": "attention on the CPU against SDPA",
    "overhead": "the host's time of a small call, of the first call, of the import",
    "rows": "the rows of kernels.def that take a case of attention or gemm, one against the other (GPU); prints, writes nothing",
}
WITHOUT_GPU = ("cpu", "overhead")
RESULTS = Path("benchmarks/results")                  # of the repository, when it is the current folder


def parse():
    class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass
    families = "\n".join(f"  {name:<16} {what}" for name, what in FAMILIES.items())
    parser = argparse.ArgumentParser(prog="python -m margay.bench", description=f"{__doc__}\n\nfamilies:\n{families}", formatter_class=Help)
    parser.add_argument("family", choices=FAMILIES, metavar="FAMILY", help="one of those above")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches, for instance 'backward .* D=128'")
    parser.add_argument("--peers", default="", help="names of the peers to run, with commas; none: all")
    parser.add_argument("--rounds", type=int, default=5, help="in each of which all runners are timed in turn")
    parser.add_argument("--ms", type=float, default=20, help="length of one measurement in milliseconds")
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
