"""The entry point: `python -m spmdrl.train CONFIG.py [--field value ...]`.

Public names: `main`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from spmdrl.config import EXIT_BAD_INPUT, EXIT_FAULT, EXIT_STOPPED, Config, ConfigError, load, validate
from spmdrl.envs.ids import check_id
from spmdrl.launch import LaunchError, detect, prepare_process, spawn


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or go on with a run; the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        topology = detect()
        config = load(argv)
        validate(config, max(topology.size, config.nprocs), max(1, config.devices))
        check_id(config.env)
        if config.nprocs > 1 and topology.size == 1:
            spawn(config.nprocs, "spmdrl.train", argv)
        prepare_process(topology, config.devices)
    except (ConfigError, LaunchError) as error:
        print(f"spmdrl: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    from spmdrl.session import run_session  # jax from here on

    return run_session(config, topology, argv)


if __name__ == "__main__":
    sys.exit(main())
