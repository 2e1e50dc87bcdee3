"""The project's benchmarks, in folders by the question they answer; README.md has the list."""

from pathlib import Path

# Commands have short names wherever they are: `python -m benchmarks.throughput` is
# speed/throughput.py. Code imports by the full name, so that no module is loaded twice.
__path__ += [
    str(Path(__file__).with_name(name))
    for name in ("speed", "scale", "cost", "peers", "coverage", "gpu")
]
