"""The scripts of `slurm/` on a real Slurm: whatever happens to a job, it ends as it should."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.children import ROOT
from tests.cluster.processes import wait_for
from tests.cluster.slurm import SlurmCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

SCRIPTS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "slurm").glob("*.sbatch"))
NODES = ["--nodes=2", "--ntasks-per-node=1"]
REACTION_S = 10  # from a disturbance until the job has ended or is in the queue again
START_S = 300  # of a job on a machine that has much else to do

CARTPOLE = ["configs/cartpole.py", "--total-steps", "10240"]
# Small rollouts of an environment that can be slow: see paced.py.
PACED = [
    "configs/cartpole.py", "--env.backend", "gymnasium", "--env.id", "paced:Paced-v0",
    "--env.threads", "1", "--algo.num-steps", "32", "--total-steps", str(100 * 4 * 32),
    "--checkpoint.every", "5",
]  # fmt: skip


def slow_after(*updates: int) -> dict[str, str]:
    """Each start of the job runs at full speed only up to that update."""
    return {"PACE_AFTER": ",".join(str(32 * update) for update in updates)}


@dataclass
class Submitted:
    """A job and where it writes."""

    cluster: SlurmCluster
    job: str
    path: Path

    def rows(self) -> list[dict]:
        file = self.path / "metrics.jsonl"
        return [json.loads(x) for x in file.read_text().splitlines()] if file.exists() else []

    def reach(self, update: int, timeout: float = START_S) -> None:
        """Wait until that many updates are in the metrics."""

        def there() -> bool:
            assert self.cluster.state(self.job) in ("PENDING", "RUNNING", "COMPLETING"), (
                self.story()
            )
            rows = self.rows()
            return bool(rows) and rows[-1]["progress/update"] >= update

        wait_for(f"update {update}", there, timeout)

    def finish(self, timeout: float = START_S) -> dict:
        self.cluster.wait(self.job, "COMPLETED", timeout=timeout)
        return json.loads((self.path / "summary.json").read_text())

    def story(self) -> str:
        logs = sorted(Path(f"{self.path}.logs").glob("rank-*.txt"))
        parts = [f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs]
        return "\n".join([str(self.cluster.job(self.job)), self.cluster.output(self.job), *parts])


@pytest.fixture(scope="module")
def submit(slurm, tmp_path_factory):
    """sbatch in the project's folder; the run directory and the output go to a temporary one."""
    jobs = []

    def start(script: str, *options: str, run: list[str], **env: str) -> Submitted:
        folder = tmp_path_factory.mktemp("jobs")
        env = {"RUNS": str(folder), "PYTHONPATH": str(Path(__file__).parent), **env}
        words = [*options, "--job-name=run", f"--output={folder}/%j.out", script, *run]
        job = slurm.sbatch(*words, cwd=ROOT, **env)
        jobs.append(Submitted(slurm, job, folder / f"run-{job}"))
        return jobs[-1]

    yield start
    for one in jobs:
        slurm.run("scancel", one.job)


@pytest.fixture
def breakable(slurm):
    """The same cluster, whose nodes may be killed; they are back afterwards."""
    yield slurm
    slurm.revive_nodes()


@pytest.fixture(scope="module")
def sliced(submit):
    """A job that needs three slices of time, on nodes of its own; it runs beside other tests."""
    # Slurm looks at the clock every 30 s, so the signal comes 30 to 60 s after the start.
    limits = ["--time=2", "--signal=USR1@60", "--nodelist=n5,n6"]
    return submit("slurm/train.sbatch", *NODES, *limits, run=PACED, **slow_after(10, 20))


@pytest.fixture(scope="session")
def local(tmp_path_factory):
    """Summary of the same run on this machine without Slurm, made once."""
    made: dict[tuple, dict] = {}

    def run(flags: list[str], nprocs: int) -> dict:
        key = (*flags, nprocs)
        if key not in made:
            path = tmp_path_factory.mktemp("local") / "run"
            command = [sys.executable, "-m", "spmdrl.train", *flags]
            command += ["--nprocs", str(nprocs), "--run-dir", str(path)]
            env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            made[key] = json.loads((path / "summary.json").read_text())
        return made[key]

    return run


def assert_same(run: Submitted, summary: dict, expected: dict) -> None:
    """The same parameters as the undisturbed run, and a metrics file without gaps or doubles."""
    assert summary["params_sha256"] == expected["params_sha256"]
    assert summary["episode_count"] == expected["episode_count"]
    assert summary["world_size"] == expected["world_size"]
    updates = [row["progress/update"] for row in run.rows()]
    assert updates == list(range(1, expected["updates"] + 1))


# ---------------------------------------------------------------------------------------------
# Undisturbed


@pytest.mark.slow
def test_two_nodes_learn_what_two_local_ranks_learn(submit, local):
    run = submit("slurm/train.sbatch", *NODES, run=CARTPOLE)
    summary = run.finish()
    assert_same(run, summary, local(CARTPOLE, 2))
    assert sorted(p.name for p in Path(f"{run.path}.logs").iterdir()) == [
        "rank-0.txt",
        "rank-1.txt",
    ]


@pytest.mark.slow
def test_two_nodes_of_two_ranks_learn_what_four_local_ranks_learn(submit, local):
    # Without it, four ranks add up in an order that depends on where they sit.
    flags = [*CARTPOLE, "--env.num-envs", "8", "--sync.deterministic"]
    run = submit("slurm/train.sbatch", "--nodes=2", "--ntasks-per-node=2", run=flags)
    summary = run.finish()
    assert_same(run, summary, local(flags, 4))


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_accepted(slurm, script):
    options = ["--cpus-per-task=1"] if "gpu" in script else []  # the nodes here are small
    done = slurm.call("sbatch", "--test-only", *options, script, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr


def test_written_script_is_submitted(slurm, tmp_path):
    command = [sys.executable, "-m", "spmdrl.slurm", f"{ROOT}/configs/cartpole.py"]
    command += ["--submit", "--out", str(tmp_path / "job.sbatch"), "--time", "5", "--nodes", "2"]
    done = slurm.call(*command, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    assert slurm.job(job)["TimeLimit"] == "00:05:00"
    assert slurm.job(job)["NumNodes"].startswith("2")
    slurm.run("scancel", job)


def test_each_rank_of_a_node_takes_its_own_gpu(slurm):
    code = (
        "import os; from spmdrl.parallel.process import prepare_process; "
        "from spmdrl.parallel.topology import detect; t = detect(); prepare_process(t, 0); "
        "print(t.rank, os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    done = slurm.call(
        "srun", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", sys.executable, "-c", code,
        cwd=ROOT,
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == [f"{r} {r % 4}" for r in range(8)], done.stderr


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_wrong_mpi_plugin_stops_at_once_with_advice(submit, slurm, mpi):
    run = submit("slurm/train.sbatch", *NODES, run=CARTPOLE, SRUN_MPI=mpi)
    slurm.wait(run.job, "FAILED", timeout=START_S)
    assert "--mpi=pmix" in slurm.output(run.job)
    assert not run.path.exists()


@pytest.mark.slow
def test_sweep_runs_every_task_in_its_own_directory(submit, slurm):
    flags = ["--total-steps", "1024", "--env.num-envs", "4"]
    run = submit("slurm/sweep.sbatch", "--array=1,3", "--ntasks-per-node=1", run=flags)
    for task, (env_id, seed) in {1: ("CartPole-v1", 2), 3: ("Acrobot-v1", 1)}.items():
        slurm.wait(f"{run.job}_{task}", "COMPLETED", timeout=START_S)
        config = json.loads(
            (run.path.with_name(f"run-{run.job}_{task}") / "config.json").read_text()
        )
        assert (config["env"]["id"], config["seed"]) == (env_id, seed)


@pytest.mark.slow
def test_bench_writes_a_table(submit):
    small = {"ENVS_PER_RANK": "4", "STEPS_PER_RANK": "1024"}
    run = submit("slurm/bench.sbatch", *NODES, run=CARTPOLE[:1], **small)
    run.cluster.wait(run.job, "COMPLETED", timeout=START_S)
    one, two = (
        json.loads((run.path / f"{ranks}-ranks" / "summary.json").read_text()) for ranks in (1, 2)
    )
    assert [(s["world_size"], s["env_steps"]) for s in (one, two)] == [(1, 1024), (2, 2048)]
    assert min(one["sps"], two["sps"]) > 0
    assert (run.path / "table.md").read_text().splitlines()[2:] == [
        f"| 1 | {one['sps']:,.0f} | 100% |",
        f"| 2 | {two['sps']:,.0f} | {two['sps'] / one['sps'] / 2:.0%} |",
    ]


# ---------------------------------------------------------------------------------------------
# Disturbed


def usr1(slurm, run: Submitted) -> None:
    slurm.run("scancel", "--signal=USR1", run.job)
    slurm.wait(run.job, "PENDING", timeout=REACTION_S)


def requeue(slurm, run: Submitted) -> None:
    slurm.run("scontrol", "requeue", run.job, check=True)
    slurm.wait(run.job, "PENDING", timeout=REACTION_S)


def preempt(slurm, run: Submitted) -> None:
    """A more urgent job wants the same nodes for a second."""
    where = slurm.job(run.job)["NodeList"]
    options = ["--partition=urgent", f"--nodelist={where}", "--exclusive", "--output=/dev/null"]
    other = slurm.sbatch(*options, "--wrap", "sleep 1", cwd=run.path)
    slurm.wait(run.job, "PENDING", timeout=REACTION_S)
    slurm.wait(other, "COMPLETED", timeout=60)


def kill_rank(slurm, run: Submitted) -> None:
    """As the kernel does when memory runs out: an end, not a reason to try for ever."""
    for pid in slurm.task_ids(run.job, rank=1):
        os.kill(pid, signal.SIGKILL)
    slurm.wait(run.job, "FAILED", timeout=REACTION_S)
    assert f"scontrol requeue {run.job}" in slurm.output(run.job)
    slurm.run("scontrol", "requeue", run.job, check=True)


def crash_first_node(slurm, run: Submitted) -> None:
    """Power cut where the batch script and rank 0 run."""
    slurm.crash_node(slurm.nodes_of(run.job)[0])
    slurm.wait(run.job, "PENDING", timeout=REACTION_S)
    assert not slurm.task_ids(run.job, 1)


def kill_last_daemon(slurm, run: Submitted) -> None:
    """slurmd dies where rank 1 runs; the rank itself lives on for a while."""
    slurm.kill_daemon(slurm.nodes_of(run.job)[-1])
    slurm.wait(run.job, "PENDING", timeout=REACTION_S)


FAULTS = [usr1, requeue, preempt, kill_rank, crash_first_node, kill_last_daemon]


@pytest.mark.slow
def test_one_job_survives_everything(submit, breakable, local, sliced):
    """Every start is disturbed in another way; the last one finishes."""
    updates = [10 + 2 * i for i in range(len(FAULTS))]
    aside = "--exclude=n5,n6"
    run = submit("slurm/train.sbatch", *NODES, aside, run=PACED, **slow_after(*updates))
    for number, (fault, update) in enumerate(zip(FAULTS, updates, strict=True)):
        run.reach(update + 1)
        assert breakable.restarts(run.job) == number
        began = time.monotonic()
        fault(breakable, run)
        print(f"{fault.__name__}: {time.monotonic() - began:.1f} s")
    summary = run.finish()
    assert_same(run, summary, local(PACED, 2))


@pytest.mark.slow
def test_three_slices_of_time(slurm, local, sliced):
    summary = sliced.finish(2 * START_S)
    assert slurm.restarts(sliced.job) == 2
    assert_same(sliced, summary, local(PACED, 2))


@pytest.mark.slow
def test_cancelled_job_stays_cancelled(submit, slurm):
    run = submit("slurm/train.sbatch", *NODES, run=PACED, **slow_after(10))
    run.reach(11)
    slurm.run("scancel", run.job)
    slurm.wait(run.job, "CANCELLED", timeout=REACTION_S)
    wait_for("the end", lambda: not slurm.task_ids(run.job, 0), REACTION_S)
    assert slurm.state(run.job) == "CANCELLED"
    assert list((run.path / "checkpoints").iterdir())
