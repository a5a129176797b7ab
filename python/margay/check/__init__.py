"""The protocol checker: runs kernels on the CPU under a scheduler that lets every asynchronous operation come late, and reports accesses that no
synchronisation orders, wrong phases and counts, missing fences, deadlocks. `python -m margay.check`; docs/protocol.md explains it.

Needs the sources (csrc) beside the package, or MARGAY_CSRC, a C++ compiler, and addr2line (binutils) for source lines.
"""
