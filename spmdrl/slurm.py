"""Write the batch script, or the mpirun command, that runs a config on several machines.

    python -m spmdrl.slurm CONFIG.py --nodes 4 --ranks-per-node 2 --submit
    python -m spmdrl.slurm CONFIG.py --hostfile hosts.txt -- --seed 3

The config is checked against the topology first, so that a job does not wait in the queue for
hours only to fail. Nothing here imports jax. Public names: `main`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from spmdrl.cluster.batch_scripts import WARNING_S, Job, pbs_script, seconds, slurm_script
from spmdrl.cluster.hostfile import (
    Host,
    as_text,
    mpirun_command,
    read_cluster,
    read_hostfile,
    ssh_advice,
)
from spmdrl.config import EXIT_BAD_INPUT, Config, ConfigError, load
from spmdrl.envs.ids import check_id
from spmdrl.runtime.validate import validate

TIME = re.compile(r"(\d+-)?\d+(:[0-5]?\d){0,2}")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,-]*")


def main(argv: Sequence[str] | None = None) -> int:
    """Print, write or submit; the exit code."""
    args, flags = parse(sys.argv[1:] if argv is None else argv)
    try:
        config = load([args.config, *flags])
        check_id(config.env)
        if config.nprocs != 1:
            raise ConfigError("--nprocs starts ranks on one machine; here use --ranks-per-node")
        if args.hostfile or args.cluster:
            return write_mpirun(args, config, flags)
        return write_batch(args, config, flags)
    except ConfigError as error:
        print(f"spmdrl: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and after `--` those of the training run."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    return parser().parse_args(words[:cut]), words[cut + 1 :]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m spmdrl.slurm",
        description="Write the batch script or mpirun command that trains on several machines.",
        epilog="What follows -- goes to spmdrl.train, for example: -- --seed 3",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("config", metavar="CONFIG.py")
    add("--nodes", type=int, default=1, help="machines (default 1)")
    add("--ranks-per-node", type=int, help="ranks on each (default 2; with GPUs one per GPU)")
    add("--gpus-per-node", type=int, default=0, help="GPUs on each, shared out among its ranks")
    add("--cpus-per-rank", type=int, help="cores of each rank (default 1; with GPUs 8)")
    add("--time", default="04:00:00", help="time limit of one slice (default 04:00:00)")
    add("--partition", default="", help="partition, or queue of PBS")
    kind = made.add_mutually_exclusive_group()
    kind.add_argument("--pbs", action="store_true", help="a script for PBS instead of Slurm")
    kind.add_argument(
        "--hostfile", help="an mpirun command for the hosts of this file: host slots=N"
    )
    kind.add_argument(
        "--cluster", metavar="HOSTS.csv", help="the same for a CSV: job,ip,tf_port,..."
    )
    add("--out", help="file to write (default: standard output)")
    add("--submit", action="store_true", help="also hand the script to sbatch or qsub")
    return made


# ---------------------------------------------------------------------------------------------
# Batch systems


def write_batch(args: argparse.Namespace, config: Config, flags: Sequence[str]) -> int:
    job = make_job(args, config, flags)
    script = pbs_script(job) if args.pbs else slurm_script(job)
    submit = submitter(args.pbs) if args.submit else ""
    out = args.out or (f"{job.name}.{'pbs' if args.pbs else 'sbatch'}" if submit else "")
    write(script, out)
    return subprocess.run([submit, out]).returncode if submit else 0


def make_job(args: argparse.Namespace, config: Config, flags: Sequence[str]) -> Job:
    """The job, after its topology was checked."""
    ranks = args.ranks_per_node if args.ranks_per_node is not None else args.gpus_per_node or 2
    cpus = args.cpus_per_rank if args.cpus_per_rank is not None else 8 if args.gpus_per_node else 1
    if args.gpus_per_node < 0:
        raise ConfigError(f"--gpus-per-node is {args.gpus_per_node}, but must be 0 or more")
    for name, value in [("nodes", args.nodes), ("ranks-per-node", ranks), ("cpus-per-rank", cpus)]:
        if value < 1:
            raise ConfigError(f"--{name} is {value}, but must be at least 1")
    check_time(args.time)
    if args.partition and not WORD.fullmatch(args.partition):
        raise ConfigError(f"--partition {args.partition!r} is not a name")
    validate(
        config, args.nodes * ranks, devices_per_rank(args.gpus_per_node, ranks, config.devices)
    )
    command = (args.config, *flags)
    return Job(
        job_name(config),
        command,
        args.nodes,
        ranks,
        cpus,
        args.gpus_per_node,
        args.time,
        args.partition,
    )


def devices_per_rank(gpus: int, ranks: int, wanted: int) -> int:
    """How many devices each rank will find; the same rule as when it starts."""
    if gpus % ranks:
        raise ConfigError(
            f"--gpus-per-node {gpus} does not divide by --ranks-per-node {ranks}; "
            f"use --ranks-per-node {gpus} for one rank per GPU, or 1 for one rank per node"
        )
    if gpus and wanted > gpus // ranks:
        raise ConfigError(f"--devices {wanted}, but each rank has only {gpus // ranks} GPUs")
    return wanted or max(1, gpus // ranks)


def check_time(time: str) -> None:
    if not TIME.fullmatch(time):
        raise ConfigError(f"--time {time!r} is not a time; for example 04:00:00, 90 or 1-12:00:00")
    if seconds(time) <= WARNING_S:
        raise ConfigError(f"--time {time} must exceed the {WARNING_S} s in which a job saves")


def job_name(config: Config) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", config.name).strip("-.") or "spmdrl"


def submitter(pbs: bool) -> str:
    name = "qsub" if pbs else "sbatch"
    if not (found := shutil.which(name)):
        raise ConfigError(f"--submit needs {name}, which is not on PATH; run this on a login node")
    return found


def write(text: str, out: str) -> None:
    if not out:
        sys.stdout.write(text)
        return
    try:
        Path(out).write_text(text)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({error.strerror})") from error
    print(f"wrote {out}", file=sys.stderr)


# ---------------------------------------------------------------------------------------------
# Plain machines


def write_mpirun(args: argparse.Namespace, config: Config, flags: Sequence[str]) -> int:
    if args.submit:
        raise ConfigError("--submit needs a batch system; run the command that is printed instead")
    hosts = read_hostfile(args.hostfile) if args.hostfile else read_cluster(args.cluster)
    check_hosts(config, hosts)
    command = mpirun_command(hosts, ["python", "-m", "spmdrl.train", args.config, *flags])
    write(as_text(command) + "\n", args.out or "")
    if advice := ssh_advice(hosts):
        print(advice, file=sys.stderr)
    return 0


def check_hosts(config: Config, hosts: Sequence[Host]) -> None:
    if any(host.gpus for host in hosts) and config.devices > 1:
        raise ConfigError(
            f"--devices {config.devices}, but the list of hosts gives one GPU to each rank"
        )
    validate(config, sum(host.slots for host in hosts), max(1, config.devices))


if __name__ == "__main__":
    sys.exit(main())
