"""What this machine takes from any program whose processes wait for each other.

    python -m benchmarks.lockstep                     # about a minute

Two processes on a core each multiply small matrices, the same number each. Freely, everyone goes on
at once; in step, all wait for the slowest after every piece of work, as ranks do after every
minibatch. What is lost in step is lost to cores that are slow at different times and, between the
shortest pieces, to the barriers. Writes benchmarks/results/lockstep.json and .md.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

from benchmarks.lib.common import (
    Spread,
    about_spread,
    arguments,
    machine,
    made_by,
    percent,
    save,
    spread,
    table,
)
from benchmarks.lib.ranks import answer_of_ranks

PIECES_MS = (0.1, 2.0, 20.0, 200.0)
BLOCK_S = 0.5  # of one way, before the other has its turn


def work(count: int, matrix: np.ndarray) -> None:
    for _ in range(count):
        matrix @ matrix


def pieces_of(ms: float, matrix: np.ndarray) -> int:
    """How many products take so long when nothing disturbs."""
    times = []
    for _ in range(200):
        start = time.perf_counter()
        work(10, matrix)
        times.append((time.perf_counter() - start) / 10)
    return max(1, round(1e-3 * ms / min(times)))


def rank_main(repeats: int, out: Path) -> None:
    """One of the two processes; rank 0 writes the shares of each piece."""
    from mpi4py import MPI

    comm, matrix = MPI.COMM_WORLD, np.full((64, 64), 1e-3, np.float32)
    found: dict[str, list[float]] = {}
    for ms in PIECES_MS * repeats:
        count = comm.bcast(pieces_of(ms, matrix))
        rounds = max(1, round(1e3 * BLOCK_S / ms))
        rates = {}
        for in_step in (False, True):
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(rounds):
                work(count, matrix)
                if in_step:
                    comm.Barrier()
            own = rounds / (time.perf_counter() - start)
            rates[in_step] = sum(comm.allgather(own))
        found.setdefault(str(ms), []).append(rates[True] / rates[False])
    if comm.rank == 0:
        out.write_text(json.dumps(found))


def report(shares: dict[str, Spread], repeats: int, head: str) -> str:
    rows = [[f"{float(ms):g} ms", percent(share)] for ms, share in shares.items()]
    header = ["work between two barriers", "speed in step, of that freely"]
    return "\n\n".join([head, table(header, rows), about_spread(repeats)])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--worker", type=Path, help="(internal) be one rank")
    args = parser.parse_args()
    if args.worker:
        return rank_main(args.repeats, args.worker)
    host = machine()
    words = ["--repeats", str(args.repeats)]
    runs = answer_of_ranks(2, "benchmarks.speed.lockstep", *words, OPENBLAS_NUM_THREADS="1")
    shares = {ms: spread(values) for ms, values in runs.items()}
    text = report(shares, args.repeats, made_by(host))
    return save("lockstep", {"machine": host, "shares": shares, "runs": runs}, text)


if __name__ == "__main__":
    main()
