"""Texts of batch scripts for Slurm and PBS, from one set of pieces.

The scripts in `slurm/` are made of the same pieces; a test keeps them equal.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from string import Template

__all__ = ["WARNING_S", "BatchJob", "pbs_script", "seconds", "slurm_script"]

# Seconds between the warning and the end of the time limit: one update and one checkpoint.
WARNING_S = 60


@dataclass(frozen=True)
class BatchJob:
    """What a batch system has to know."""

    name: str
    command: tuple[str, ...]  # the config file and the flags after it
    nodes: int = 1
    ranks_per_node: int = 2
    cpus_per_rank: int = 1
    gpus_per_node: int = 0
    time: str = "04:00:00"
    partition: str = ""
    run_dir: str = ""  # by default one of its own for each job


def slurm_script(job: BatchJob) -> str:
    """An sbatch script that saves, requeues and resumes by itself."""
    pieces = [SLURM_HEAD, SLURM_GPU if job.gpus_per_node else SLURM_CPU, SLURM_LIMITS]
    pieces += [SLURM_RUN_DIR, RANK, SLURM_START, SLURM_END]
    partition = f"#SBATCH --partition={job.partition}" if job.partition else PARTITION_HINT
    own = "${RUNS:-runs}/$SLURM_JOB_NAME-$job"
    values = _values(job) | {"run_dir": shlex.quote(job.run_dir) if job.run_dir else own}
    return Template("".join(pieces)).substitute(values, partition_line=partition)


def pbs_script(job: BatchJob) -> str:
    """The same for PBS: qsub, mpiexec, and a job that submits its own continuation."""
    select = f"select={job.nodes}:ncpus={job.ranks_per_node * job.cpus_per_rank}"
    select += f":mpiprocs={job.ranks_per_node}"
    select += f":ngpus={job.gpus_per_node}" if job.gpus_per_node else ""
    queue = f"#PBS -q {job.partition}" if job.partition else "##PBS -q NAME"
    slice_s = max(1, seconds(job.time) - WARNING_S)
    own = f"runs/${{PBS_JOBNAME:-{job.name}}}-${{PBS_JOBID:?only inside a PBS job}}"
    values = _values(job) | {"run_dir": shlex.quote(job.run_dir) if job.run_dir else own}
    values |= {"select": select, "queue_line": queue, "slice_s": str(slice_s)}
    return Template("".join([PBS_HEAD, RANK, PBS_START])).substitute(values)


def _values(job: BatchJob) -> dict[str, str]:
    return {
        "name": job.name,
        "nodes": str(job.nodes),
        "ranks": str(job.ranks_per_node),
        "cpus": str(job.cpus_per_rank),
        "gpus": str(job.gpus_per_node),
        "time": job.time,
        "warning_s": str(WARNING_S),
        "command": shlex.join(job.command),
    }


def seconds(time: str) -> int:
    """Slurm's time, from "90" (minutes) to "1-12:00:00"."""
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if days:
        parts += [0] * (3 - len(parts))  # D-HH, D-HH:MM, D-HH:MM:SS
    elif len(parts) < 3:
        parts = [0, *parts, *([0] * (2 - len(parts)))]  # MM, MM:SS
    hours, minutes, secs = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs


# ---------------------------------------------------------------------------------------------
# Slurm. $$ is one dollar in the script.

SLURM_HEAD = """\
#!/bin/bash
# Train on one node or on many: only the numbers below change, or those on the command line.
#
#   sbatch SCRIPT                                        the run named further down
#   sbatch SCRIPT configs/pong.py --seed 3               another run
#   sbatch --nodes=8 --ntasks-per-node=32 SCRIPT ...     another size
#
# The job takes care of itself. Shortly before its time limit, when it is preempted and when a node
# fails, it is requeued under the same job id and later resumes exactly where it stopped, in its own
# run directory.
#
#   tail -f runs/NAME-JOBID.logs/rank-0.txt              watch its progress
#   scancel --signal=USR1 JOBID                          save now and requeue
#   scancel JOBID                                        end it for good (checkpoints stay)

#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
"""

SLURM_CPU = """\
# Ranks per node, and cores per rank. Without GPUs, many ranks of one core each are fastest.
#SBATCH --ntasks-per-node=$ranks
#SBATCH --cpus-per-task=$cpus
"""

SLURM_GPU = """\
#SBATCH --gpus-per-node=$gpus
# One rank per GPU: as many ranks as GPUs on each node; every rank takes its own.
#SBATCH --ntasks-per-node=$ranks
# Cores per rank, for the environments. Atari and MuJoCo can keep 8 to 16 busy per GPU.
#SBATCH --cpus-per-task=$cpus
# The alternative, one rank per node that drives all of its GPUs: add one # to each of the two
# #SBATCH lines above and remove one from each of the two below.
##SBATCH --ntasks-per-node=1
##SBATCH --cpus-per-task=32
"""

PARTITION_HINT = """\
# Where to run, if your site requires it: remove one #.
##SBATCH --partition=NAME
##SBATCH --account=NAME"""

SLURM_LIMITS = """\
$partition_line
#SBATCH --time=$time
# $warning_s seconds before the end of that time (Slurm may be up to a minute early) every rank gets
# USR1, finishes its update, saves and exits. If one update with its checkpoint takes longer, raise
# the number. "USR1@", not "B:USR1@": the ranks need the signal, not this shell.
#SBATCH --signal=USR1@$warning_s
# Slurm itself may requeue the job when a node fails or a job of higher priority preempts it.
#SBATCH --requeue
# A resumed job appends to its output file. Slurm does not create folders for it.
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
"""

SLURM_RUN_DIR = """\

set -euo pipefail

# What to train, unless it is given after the script's name.
[ $$# -gt 0 ] || set -- $command
config=$$1
shift

# The environment that `uv sync` makes, if there is one; else the python that your modules provide.
# module load openmpi
[ ! -d .venv/bin ] || PATH="$$PWD/.venv/bin:$$PATH"
python=$$(command -v python)

# The same folder whenever this job is requeued: that is how it finds its checkpoints.
job=$${SLURM_ARRAY_JOB_ID:-$$SLURM_JOB_ID}$${SLURM_ARRAY_TASK_ID:+_$$SLURM_ARRAY_TASK_ID}
run_dir=$run_dir
logs=$$run_dir.logs
mkdir -p "$$logs"
"""

# Shared with PBS.
RANK = """\

# What every rank does. Exit code 75 means "saved; start me again". It is recorded in a file instead
# of returned, because the first rank to exit with a code would get the slower ones killed. A signal
# that arrives before the program handles it must not kill it either.
stopped=$$logs/stopped
rm -f "$$stopped"
# shellcheck disable=SC2016
rank='trap "" USR1 TERM
"$$@" && exit 0 || code=$$?
[ "$$code" -eq 75 ] || exit "$$code"
: >"$$0"'
"""

SLURM_START = """\

echo "$$(date '+%F %T') job $$job, start $$((1 + $${SLURM_RESTART_COUNT:-0})):" \\
  "$$SLURM_NTASKS ranks on $$SLURM_JOB_NODELIST; run directory $$run_dir, their output in $$logs"

# --mpi: pmix for Open MPI, pmi2 for MPICH and its relatives (SRUN_MPI=pmi2 sbatch ...).
# --kill-on-bad-exit: when one rank fails, end all at once instead of letting them wait for it.
# --cpus-per-task: since Slurm 22.05 a step no longer inherits it from the job.
code=0
srun --mpi="$${SRUN_MPI:-pmix}" --kill-on-bad-exit=1 \\
  --cpus-per-task="$${SLURM_CPUS_PER_TASK:-1}" --cpu-bind=cores \\
  --output="$$logs/rank-%t.txt" --open-mode=append \\
  bash -c "$$rank" "$$stopped" \\
  "$$python" -m spmdrl.train "$$config" --run-dir "$$run_dir" "$$@" || code=$$?
"""

SLURM_END = """\

if [ "$$code" -ne 0 ]; then
  echo "$$(date '+%F %T') failed with exit code $$code. The last lines of the ranks:"
  tail -n 15 "$$logs"/rank-*.txt 2>/dev/null | tail -n 100 || true
  echo "To resume from the last checkpoint: scontrol requeue $$SLURM_JOB_ID"
  exit "$$code"
fi
if [ -e "$$stopped" ]; then
  echo "$$(date '+%F %T') saved; requeueing"
  scontrol requeue "$$SLURM_JOB_ID"
fi
"""

# ---------------------------------------------------------------------------------------------
# PBS

PBS_HEAD = """\
#!/bin/bash
# Train under PBS on one node or on many. Submit with: qsub SCRIPT
#
# Shortly before its time limit the job saves and submits its own continuation, which resumes
# exactly where it stopped, in the same run directory. End it for good: qdel JOBID.

#PBS -N $name
#PBS -l $select
#PBS -l walltime=$time
$queue_line
# PBS may restart the job when a node fails.
#PBS -r y
#PBS -j oe

set -euo pipefail
cd "$${PBS_O_WORKDIR:-.}"

# What to train.
set -- $command
config=$$1
shift

# The environment that `uv sync` makes, if there is one; else the python that your modules provide.
# module load openmpi
[ ! -d .venv/bin ] || PATH="$$PWD/.venv/bin:$$PATH"
python=$$(command -v python)

# The first job of the chain chooses the run directory and hands it on to its continuations.
export RUN_DIR=$${RUN_DIR:-$run_dir}
logs=$$RUN_DIR.logs
mkdir -p "$$logs"
[ -e "$$logs/job.pbs" ] || cp "$$0" "$$logs/job.pbs"
"""

PBS_START = """\

ranks=$$(wc -l <"$$PBS_NODEFILE")
echo "$$(date '+%F %T') job $$PBS_JOBID: $$ranks ranks; run directory $$RUN_DIR"

# PBS cannot warn a job before its end, so timeout sends USR1 $warning_s seconds early; mpiexec
# passes it on to the ranks.
code=0
timeout --preserve-status --signal=USR1 $slice_s \\
  mpiexec -n "$$ranks" --hostfile "$$PBS_NODEFILE" \\
  bash -c "$$rank" "$$stopped" \\
  "$$python" -m spmdrl.train "$$config" --run-dir "$$RUN_DIR" "$$@" \\
  >>"$$logs/ranks.txt" 2>&1 || code=$$?

if [ "$$code" -ne 0 ]; then
  echo "$$(date '+%F %T') failed with exit code $$code. The last lines of the ranks:"
  tail -n 30 "$$logs/ranks.txt"
  echo "To resume from the last checkpoint: qsub -v RUN_DIR=$$RUN_DIR $$logs/job.pbs"
  exit "$$code"
fi
if [ -e "$$stopped" ]; then
  echo "$$(date '+%F %T') saved; submitting the continuation"
  qsub -v RUN_DIR="$$RUN_DIR" "$$logs/job.pbs"
fi
"""
