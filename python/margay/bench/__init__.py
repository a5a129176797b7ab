"""Benchmarks against PyTorch: `python -m margay.bench attention --plot`."""
