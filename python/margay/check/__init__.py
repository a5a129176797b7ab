"""The protocol checker: `python -m margay.check`; docs/protocol.md is its manual.

It runs kernels on the CPU under a scheduler that delays every asynchronous operation. It reports races, wrong phases
and counts, missing fences and deadlocks, with both source lines.
It needs the sources (csrc) beside the package, or MARGAY_CSRC, C and C++ compilers, ld, nm and addr2line (binutils).
"""
