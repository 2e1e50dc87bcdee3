"""Many messages between couriers, checked one by one; what the processes' memory does meanwhile.

    mpirun -np 3 python -m tests.courier_soak 100000          # a minute or two

Ranks 1 and 2 send numbered messages of 100 blocks to rank 0, which has three receives posted for
each of them, as a learner has for lag 2. Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from spmdrl.parallel.courier import Courier
from spmdrl.parallel.topology import detect
from spmdrl.parallel.wire import BLOCK
from spmdrl.parallel.world import World, connect

POSTED = 3
NBYTES = 100 * BLOCK


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def receive(world: World, courier: Courier, count: int) -> dict[str, float]:
    rooms = {rank: np.zeros((POSTED, NBYTES), np.uint8) for rank in (1, 2)}
    here: set[tuple[int, int]] = set()
    found = {"received": 0, "wrong": 0}

    def expect(rank: int, number: int) -> None:
        def arrived(nbytes: int) -> None:
            found["wrong"] += nbytes != NBYTES
            here.add((rank, number))

        courier.receive(rooms[rank][number % POSTED], rank, arrived)

    for rank in rooms:
        for number in range(min(POSTED, count)):
            expect(rank, number)
    world.meet()
    early, cpu = 0, time.process_time()
    for number in range(count):
        for rank, room in rooms.items():
            courier.wait(lambda want=(rank, number): want in here)  # type: ignore[misc]
            here.discard((rank, number))
            words = room[number % POSTED].view(np.int64)
            found["wrong"] += int((words != 2 * number + rank).any())
            found["received"] += 1
            if number + POSTED < count:
                expect(rank, number + POSTED)
        if number == count // 10:
            early = resident()
    growth = resident() - early
    return found | {"growth": growth, "cpu_s": time.process_time() - cpu}


def send(world: World, courier: Courier, count: int) -> None:
    rooms, under_way = np.zeros((POSTED, NBYTES), np.uint8), set()
    world.meet()
    for number in range(count):
        courier.wait(lambda old=number - POSTED: old not in under_way)  # type: ignore[misc]
        rooms[number % POSTED].view(np.int64)[:] = 2 * number + world.rank
        under_way.add(number)
        done = lambda nbytes, n=number: under_way.discard(n)  # noqa: E731
        courier.send(rooms[number % POSTED], 0, done)
    courier.wait(lambda: not under_way)


def main(count: int) -> None:
    world = connect(detect())
    courier, started = Courier(world.program_comm), time.perf_counter()
    if world.is_root:
        found = receive(world, courier, count)
        print("\nsoak", json.dumps(found | {"seconds": time.perf_counter() - started}), flush=True)
    else:
        send(world, courier, count)
    world.meet()
    before = time.process_time()
    if not world.is_root:  # one more second with a receive that never comes
        courier.receive(np.zeros(NBYTES, np.uint8), 0, lambda nbytes: None)
        time.sleep(1.0)
        print(f"\nidle {time.process_time() - before:.4f}", flush=True)
    world.meet()
    courier.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
