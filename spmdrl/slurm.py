"""Write the batch script, or the mpirun command, that runs a config on several machines.

    python -m spmdrl.slurm CONFIG.py --nodes 4 --ranks-per-node 2 --submit
    python -m spmdrl.slurm CONFIG.py --hostfile hosts.txt -- --seed 3

The config is checked against the topology first, so that a job does not wait in the queue for
hours only to fail. Nothing here imports jax.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from spmdrl.cli import answer_errors
from spmdrl.cluster.batch_scripts import WARNING_S, BatchJob, pbs_script, seconds, slurm_script
from spmdrl.cluster.hostfile import (
    Host,
    as_text,
    mpirun_over_hosts,
    read_cluster,
    read_hostfile,
    role_flags,
    ssh_advice,
)
from spmdrl.config import Config, ConfigError, load
from spmdrl.envs.ids import check_id
from spmdrl.options import ConfigFile, parse
from spmdrl.runtime.validate import validate

__all__ = ["main"]

TIME = re.compile(r"(\d+-)?\d+(:[0-5]?\d){0,2}")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,-]*")

_one_of = tyro.conf.create_mutex_group(required=False, title="instead of a Slurm script")


@dataclass(frozen=True)
class Options:
    """Write the batch script or mpirun command that trains on several machines.

    What follows -- goes to spmdrl.train, for example: -- --seed 3
    """

    config: ConfigFile
    """Config file, as for `spmdrl.train`; it is checked against the topology."""
    nodes: int = 1
    """Number of machines."""
    ranks_per_node: int | None = None
    """Ranks per node; by default 2, or 1 if the config has too few environments for that; with
    GPUs one per GPU."""
    gpus_per_node: int = 0
    """GPUs per node, split between its ranks."""
    cpus_per_rank: int | None = None
    """Cores per rank; by default 1, with GPUs 8."""
    time: str = "04:00:00"
    """Time limit of one job; it resumes in the next."""
    partition: str = ""
    """Partition, or queue of PBS."""
    pbs: Annotated[bool, _one_of] = False
    """A script for PBS."""
    hostfile: Annotated[str | None, _one_of] = None
    """An mpirun command for the hosts of this file: host slots=N"""
    cluster: Annotated[str | None, _one_of, tyro.conf.arg(metavar="HOSTS.csv")] = None
    """An mpirun command for the hosts of a CSV: job,ip,tf_port,..."""
    out: str | None = None
    """File to write; by default standard output."""
    submit: bool = False
    """Also hand the script to sbatch or qsub."""


@answer_errors()
def main(argv: Sequence[str] | None = None) -> int:
    """Print, write or submit; the exit code."""
    own, flags = split(sys.argv[1:] if argv is None else argv)
    options = parse(Options, "slurm", own)
    config = load([options.config, *flags])
    check_id(config.env)
    if config.nprocs != 1:
        raise ConfigError("--nprocs starts ranks on one machine; here use --ranks-per-node")
    if options.submit and (options.hostfile or options.cluster):
        raise ConfigError("--submit needs a batch system; run the command that is printed instead")
    if options.hostfile:
        return write_mpirun(read_hostfile(options.hostfile), options, config, flags)
    if options.cluster:
        return write_mpirun(read_cluster(options.cluster), options, config, flags)
    return write_batch(options, config, flags)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and after `--` those of the training run."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut + 1 :]


# ---------------------------------------------------------------------------------------------
# Batch systems


def write_batch(options: Options, config: Config, flags: Sequence[str]) -> int:
    job = make_job(options, config, flags)
    script = pbs_script(job) if options.pbs else slurm_script(job)
    submit = submitter(options.pbs) if options.submit else ""
    out = options.out or (f"{job.name}.{'pbs' if options.pbs else 'sbatch'}" if submit else "")
    write(script, out)
    return subprocess.run([submit, out]).returncode if submit else 0


def make_job(options: Options, config: Config, flags: Sequence[str]) -> BatchJob:
    """The job, after its topology was checked."""
    nodes, gpus = options.nodes, options.gpus_per_node
    ranks = options.ranks_per_node if options.ranks_per_node is not None else gpus
    if options.ranks_per_node is None and not gpus:
        ranks = 2 if config.env.num_envs >= 2 * nodes else 1
    cpus = options.cpus_per_rank if options.cpus_per_rank is not None else 8 if gpus else 1
    if gpus < 0:
        raise ConfigError(f"--gpus-per-node is {gpus}, but must be 0 or more")
    for name, value in (("nodes", nodes), ("ranks-per-node", ranks), ("cpus-per-rank", cpus)):
        if value < 1:
            raise ConfigError(f"--{name} is {value}, but must be at least 1")
    check_time(options.time)
    if options.partition and not WORD.fullmatch(options.partition):
        raise ConfigError(f"--partition {options.partition!r} is not a name")
    validate(config, nodes * ranks, devices_per_rank(gpus, ranks, config.devices))
    return BatchJob(
        name=job_name(config),
        command=(options.config, *without_run_dir(flags)),
        run_dir=(config.run_dir or "") if without_run_dir(flags) != list(flags) else "",
        nodes=nodes,
        ranks_per_node=ranks,
        cpus_per_rank=cpus,
        gpus_per_node=gpus,
        time=options.time,
        partition=options.partition,
    )


def without_run_dir(flags: Sequence[str]) -> list[str]:
    """The script gives the run directory itself, and says which it is."""
    left, kept = list(flags), []
    while left:
        word = left.pop(0)
        name, has_value, _ = word.partition("=")
        if name.replace("_", "-") != "--run-dir":
            kept.append(word)
        elif not has_value:
            left[:1] = []
    return kept


def devices_per_rank(gpus: int, ranks: int, wanted: int) -> int:
    """How many devices each rank will find; the same rule as when it starts."""
    if gpus % ranks:
        raise ConfigError(
            f"--gpus-per-node {gpus} is not divisible by --ranks-per-node {ranks}; "
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


def write_mpirun(
    hosts: Sequence[Host], options: Options, config: Config, flags: Sequence[str]
) -> int:
    roles = role_flags(hosts)
    if roles:
        config = load([options.config, *flags, *roles])
        flags = [*flags, *roles]
    check_hosts(config, hosts)
    command = mpirun_over_hosts(hosts, ["python", "-m", "spmdrl.train", options.config, *flags])
    write(as_text(command) + "\n", options.out or "")
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
