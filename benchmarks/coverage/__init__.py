"""Which environments work: benchmarks of breadth, not of speed."""
