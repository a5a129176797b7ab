"""The benchmark of matrix products."""
