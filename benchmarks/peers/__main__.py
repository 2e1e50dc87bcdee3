"""`python -m benchmarks.peers`: the command is in comparison.py."""

from benchmarks.peers.comparison import main

main()
