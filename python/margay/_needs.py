"""What a program of this package needs and does not find: one line on stderr and exit status 2."""

import importlib.util
import sys


def stop(program, what):
    print(f"{program}: {what}", file=sys.stderr)
    raise SystemExit(2)


def torch(program):
    if not importlib.util.find_spec("torch"):
        stop(program, "torch is not installed, expected torch >= 2.4")


def gpu(program, what, otherwise):
    """`what` needs a GPU; `otherwise`: what runs without one."""
    from torch.cuda import is_available

    from margay import info

    reason = info()["gpu_reason"] or ("" if is_available() else "PyTorch sees no GPU")
    if reason:
        stop(program, f"{what} needs a GPU, and none can be used ({reason}); {otherwise} runs without")
