"""Attention's benchmarks: dense calls on a GPU and on the CPU, its features, generation."""
