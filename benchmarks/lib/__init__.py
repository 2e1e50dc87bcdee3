"""What the benchmarks share; no commands."""
