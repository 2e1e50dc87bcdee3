"""`python -m spmdrl.slurm`: what it writes, what it refuses, and the scripts in `slurm/`."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl import slurm
from spmdrl.cluster import batch_scripts, hostfile
from spmdrl.config import ConfigError
from tests.children import ROOT, clean_environment

CONFIG = "configs/cartpole.py"
OLD_HEADER = "job,ip,tf_port,cuda_visible_devices,ssh_port,ssh_username,ssh_password\n"
needs_shellcheck = pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="shellcheck is not installed"
)


@pytest.fixture(autouse=True)
def _in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def run(capsys):
    """Call the command: exit code, output, complaints."""

    def call(*argv: str) -> tuple[int, str, str]:
        code = slurm.main([CONFIG, *argv])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def directives(script: str) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in script.splitlines() if line.startswith("#SBATCH")]


# ---------------------------------------------------------------------------------------------
# Slurm


def test_shipped_train_script_is_what_the_command_writes(run):
    assert run() == (0, (ROOT / "slurm/train.sbatch").read_text(), "")


def test_shipped_gpu_script_is_what_the_command_writes(capsys):
    assert slurm.main(["configs/pong.py", "--gpus-per-node", "4"]) == 0
    assert capsys.readouterr().out == (ROOT / "slurm/train_gpu.sbatch").read_text()


def test_sweep_starts_ranks_like_train():
    train, sweep = ((ROOT / f"slurm/{name}.sbatch").read_text() for name in ("train", "sweep"))
    common = train[train.index("# The environment that") :]
    assert sweep.endswith(common)
    assert {d for d in directives(train) if "output" not in d and "job-name" not in d} <= set(
        directives(sweep)
    )


def test_bench_treats_stopped_ranks_like_train():
    train, bench = ((ROOT / f"slurm/{name}.sbatch").read_text() for name in ("train", "bench"))
    assert train[train.index("# What every rank does") : train.index("echo")] in bench


def test_topology_reaches_the_directives(run):
    code, script, _ = run(
        "--nodes", "4", "--ranks-per-node", "2", "--cpus-per-rank", "3", "--time", "1-00:00:00",
        "--partition", "long", "--", "--env.num-envs", "16", "--seed", "3",
    )  # fmt: skip
    assert code == 0
    wanted = ["--nodes=4", "--ntasks-per-node=2", "--cpus-per-task=3", "--time=1-00:00:00"]
    wanted += ["--partition=long", "--requeue", "--signal=USR1@60", "--open-mode=append"]
    assert set(wanted) <= set(directives(script))
    assert "set -- configs/cartpole.py --env.num-envs 16 --seed 3\n" in script
    assert "##SBATCH --partition" not in script


def test_one_rank_for_all_gpus_of_a_node(run):
    code, script, _ = run("--gpus-per-node", "4", "--ranks-per-node", "1")
    assert code == 0
    assert {"--gpus-per-node=4", "--ntasks-per-node=1"} <= set(directives(script))


@needs_shellcheck
@pytest.mark.parametrize("script", sorted(p.name for p in (ROOT / "slurm").glob("*.sbatch")))
def test_shellcheck(script):
    done = subprocess.run(["shellcheck", ROOT / "slurm" / script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@needs_shellcheck
@pytest.mark.parametrize("kind", [(), ("--pbs",), ("--partition", "x"), ("--gpus-per-node", "2")])
def test_shellcheck_of_written_scripts(run, tmp_path, kind):
    out = tmp_path / "job.sh"
    assert run(*kind, "--out", str(out), "--", "--name", "it's two words")[0] == 0
    done = subprocess.run(["shellcheck", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_few_environments_get_one_rank_on_each_node(run):
    code, script, _ = run("--nodes", "4")  # CartPole's four
    assert code == 0
    assert {"--nodes=4", "--ntasks-per-node=1"} <= set(directives(script))


@pytest.mark.parametrize("flags", [["--run-dir", "my runs/x"], ["--run-dir=my runs/x"]])
@pytest.mark.parametrize("kind", [(), ("--pbs",)])
def test_a_given_run_directory_is_the_one_that_is_announced(run, flags, kind):
    code, script, _ = run(*kind, "--", "--seed", "3", *flags)
    assert code == 0
    name = "RUN_DIR" if kind else "run_dir"
    line = next(x for x in script.splitlines() if f"{name}=" in x and "spmdrl" not in x)
    shown = subprocess.run(
        ["bash", "-c", f'{line}\nprintf %s "${name}"'], capture_output=True, text=True
    )
    assert shown.stdout == "my runs/x"
    assert f"set -- {CONFIG} --seed 3\n" in script
    assert script.count("my runs/x") == 1


def test_odd_words_reach_the_run_unharmed(run, tmp_path):
    odd = ["--name", "two words; $HOME 'quoted' \"twice\" `id` \\"]
    _, script, _ = run("--", *odd)
    line = next(x for x in script.splitlines() if "set -- " in x)
    shown = subprocess.run(
        ["bash", "-c", f'{line}\nprintf "%s\\0" "$@"'], capture_output=True, text=True
    )
    assert shown.stdout.split("\0")[:-1] == [CONFIG, *odd]
    assert "--job-name=two-words-HOME-quoted-twice-id\n" in script


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nodes", "0"], "--nodes is 0, but must be at least 1"),
        (["--ranks-per-node", "-1"], "--ranks-per-node is -1"),
        (["--cpus-per-rank", "0"], "--cpus-per-rank is 0"),
        (["--nodes", "4", "--ranks-per-node", "2"], "env.num_envs 4 is not divisible by 8 ranks"),
        (["--gpus-per-node", "4", "--ranks-per-node", "3"], "is not divisible"),
        (["--gpus-per-node", "-1"], "--gpus-per-node is -1"),
        (["--gpus-per-node", "2", "--", "--devices", "2"], "each rank has only 1 GPUs"),
        (["--time", "soon"], "is not a time"),
        (["--time", "00:00:59"], "must exceed the 60 s"),
        (["--partition", "a b; rm -rf"], "is not a name"),
        (["--", "--nprocs", "2"], "use --ranks-per-node"),
        (["--", "--env.id", "CartPol-v1"], "did you mean CartPole-v1?"),
        (["--hostfile", "/does/not/exist"], "cannot be read"),
        (["--out", "/does/not/exist/job.sbatch"], "cannot be written"),
    ],
)
def test_bad_input_is_answered_with_exit_code_2(run, argv, said):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert said in err


def test_missing_config_names_a_similar_one(capsys):
    assert slurm.main(["configs/cartpol.py"]) == 2
    assert "did you mean configs/cartpole.py?" in capsys.readouterr().err


def test_unknown_option_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        slurm.main([CONFIG, "--node", "2"])
    assert "--node" in capsys.readouterr().err


def test_jax_stays_out():
    code = "import sys, spmdrl.slurm; sys.exit(any(m in sys.modules for m in ('jax', 'mpi4py')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("90", 5400),
        ("01:30", 90),
        ("04:00:00", 14400),
        ("2-0", 172800),
        ("1-12", 129600),
        ("1-02:03", 93780),
        ("1-02:03:04", 93784),
    ],
)
def test_slurm_times(time, expected):
    assert batch_scripts.seconds(time) == expected


def fake_command(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


def test_submit_hands_over_the_file(run, tmp_path, monkeypatch):
    fake_command(tmp_path, "sbatch", f'echo "$@" >{tmp_path}/seen')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    out = tmp_path / "job.sbatch"
    code, _, err = run("--submit", "--out", str(out))
    assert code == 0
    assert str(out) in err
    assert (tmp_path / "seen").read_text() == f"{out}\n"
    assert out.read_text() == (ROOT / "slurm/train.sbatch").read_text()


def test_submit_hands_on_the_refusal(run, tmp_path, monkeypatch):
    fake_command(tmp_path, "sbatch", "exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert run("--submit", "--out", str(tmp_path / "job.sbatch"))[0] == 3


def test_submit_without_slurm(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run("--submit", "--out", str(tmp_path / "job"))
    assert code == 2
    assert "sbatch, which is not on PATH" in err
    assert not (tmp_path / "job").exists()


# ---------------------------------------------------------------------------------------------
# The scripts' own logic, with stand-ins for srun, mpiexec, scontrol and qsub


class Site:
    """Runs a script where the ranks are stand-ins that leave with the given codes."""

    def __init__(self, folder: Path):
        self._folder, self._calls = folder, folder / "calls"

    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()

    def __call__(
        self, script: Path, codes: str, *arguments: str, **env: str
    ) -> subprocess.CompletedProcess[str]:
        here = self._folder / "bin"
        here.mkdir(exist_ok=True)
        fake_command(here, "python", f'echo "python $*" >>{self._calls}\nexit "$CODE"')
        starter = (
            'while [ "$1" != bash ]; do shift; done\nworst=0\n'
            f'for CODE in {codes}; do export CODE; "$@" || worst=$?; done\nexit $worst'
        )
        for name in ("srun", "mpiexec"):
            fake_command(here, name, starter)
        for name in ("scontrol", "qsub"):
            fake_command(here, name, f'echo "{name} $*" >>{self._calls}')
        slurm_env = {
            "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "x", "SLURM_NTASKS": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
        }  # fmt: skip
        slurm_env |= env | {"PATH": f"{here}:{os.environ['PATH']}"}
        return subprocess.run(
            ["bash", script, *arguments],
            cwd=self._folder, env=clean_environment(**slurm_env), capture_output=True, text=True,
        )  # fmt: skip


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


TRAIN = ROOT / "slurm/train.sbatch"


def test_finished_job_ends(site):
    assert site(TRAIN, "0 0").returncode == 0
    assert site.calls() == [f"python -m spmdrl.train {CONFIG} --run-dir runs/x-17"] * 2


def test_stopped_job_queues_again(site):
    done = site(TRAIN, "75 75", "other.py", "--seed", "3")
    assert done.returncode == 0
    assert site.calls()[0] == "python -m spmdrl.train other.py --run-dir runs/x-17 --seed 3"
    assert site.calls()[-1] == "scontrol requeue 17"


def test_mark_of_an_earlier_start_is_forgotten(site):
    site(TRAIN, "75 75")
    site(TRAIN, "0 0")
    assert sum(call.startswith("scontrol") for call in site.calls()) == 1


def test_failed_job_says_so_and_does_not_queue_again(site):
    done = site(TRAIN, "75 1")
    assert done.returncode == 1
    assert not [call for call in site.calls() if call.startswith("scontrol")]
    assert "scontrol requeue 17" in done.stdout


def test_array_task_has_a_directory_of_its_own(site):
    array = {"SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "4"}
    assert site(ROOT / "slurm/sweep.sbatch", "75", "--total-steps", "9", **array).returncode == 0
    assert site.calls() == [
        "python -m spmdrl.train configs/acrobot.py --run-dir runs/x-16_4 --seed 2 --total-steps 9",
        "scontrol requeue 17",
    ]


def test_array_beyond_the_lists(site):
    array = {"SLURM_ARRAY_JOB_ID": "16", "SLURM_ARRAY_TASK_ID": "6"}
    done = site(ROOT / "slurm/sweep.sbatch", "0", **array)
    assert done.returncode == 2
    assert "correct --array" in done.stdout


# ---------------------------------------------------------------------------------------------
# PBS


@pytest.fixture
def pbs(run, tmp_path):
    out = tmp_path / "job.pbs"
    assert run("--pbs", "--nodes", "2", "--time", "01:00:00", "--out", str(out))[0] == 0
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    return out, {"PBS_JOBID": "5.host", "PBS_JOBNAME": "c", "PBS_NODEFILE": str(tmp_path / "nodes")}


def test_pbs_directives(pbs):
    text = pbs[0].read_text()
    assert "#PBS -l select=2:ncpus=2:mpiprocs=2\n" in text
    assert "#PBS -l walltime=01:00:00\n" in text
    assert "--signal=USR1 3540 " in text


def test_pbs_job_submits_its_continuation(pbs, site, tmp_path):
    script, env = pbs
    assert site(script, "75", **env).returncode == 0
    assert site.calls()[-1] == "qsub -v RUN_DIR=runs/c-5.host runs/c-5.host.logs/job.pbs"
    later = env | {"PBS_JOBID": "6.host", "RUN_DIR": "runs/c-5.host"}
    assert site(tmp_path / "runs/c-5.host.logs/job.pbs", "0", **later).returncode == 0
    assert site.calls()[-1] == f"python -m spmdrl.train {CONFIG} --run-dir runs/c-5.host"


def test_pbs_failure(pbs, site):
    done = site(pbs[0], "1", **pbs[1])
    assert done.returncode == 1
    assert "qsub -v RUN_DIR=runs/c-5.host" in done.stdout


# ---------------------------------------------------------------------------------------------
# Machines without a batch system


def write(folder: Path, text: str) -> str:
    file = folder / "hosts"
    file.write_text(text)
    return str(file)


def test_hostfile(tmp_path):
    file = write(tmp_path, "# two\nnode-a slots=4\n\nnode-b  # one\nnode-c:2\nnode-a slots=1\n")
    assert [(h.name, h.slots) for h in hostfile.read_hostfile(file)] == [
        ("node-a", 5),
        ("node-b", 1),
        ("node-c", 2),
    ]


def test_hostfile_becomes_mpirun(run, tmp_path):
    code, out, _ = run("--hostfile", write(tmp_path, "a slots=2\nb slots=2\n"), "--", "--seed", "3")
    words = shlex.split(out)
    assert code == 0
    assert words[0] == "mpirun"
    assert words[words.index("--host") + 1] == "a:2,b:2"
    assert words[words.index("-np") + 1] == "4"
    assert words[-6:] == ["python", "-m", "spmdrl.train", CONFIG, "--seed", "3"]
    assert ("--allow-run-as-root" in words) == (os.geteuid() == 0)


def test_hosts_are_checked_against_the_config(run, tmp_path):
    code, _, err = run("--hostfile", write(tmp_path, "a slots=4\nb slots=4\n"))
    assert code == 2
    assert "is not divisible by 8 ranks" in err


def test_old_csv(tmp_path):
    text = OLD_HEADER + 'worker,10.0.0.1,2222,"0,1",22,,\nworker,10.0.0.2,2222,,22,,\n'
    found = hostfile.read_cluster(write(tmp_path, text))
    assert found == [hostfile.Host("10.0.0.1", 2, ("0", "1")), hostfile.Host("10.0.0.2", 1)]


def test_old_csv_rows_of_one_machine_add_up(tmp_path):
    text = OLD_HEADER + "ps,a,1,-1,22,,\nworker,a,2,-1,22,,\nworker,b,2,,22,,\n"
    assert [(h.name, h.slots) for h in hostfile.read_cluster(write(tmp_path, text))] == [
        ("a", 2),
        ("b", 1),
    ]


def test_old_csv_becomes_mpirun_with_gpus_and_ssh(run, tmp_path):
    text = OLD_HEADER + 'w,a,1,"0,1",2200,me,\nw,b,1,3,2200,me,\nw,c,1,1,2200,me,\n'
    code, out, err = run("--cluster", write(tmp_path, text))
    assert (code, err) == (0, "")
    first, second, third = shlex.join(shlex.split(out)).split(" : ")
    assert "--prtemca plm_ssh_args '-p 2200 -l me'" in first
    assert "-np 2 --host a:2 -x CUDA_VISIBLE_DEVICES=0,1 python" in first
    assert second.startswith("-np 1 --host b:1 -x CUDA_VISIBLE_DEVICES=3 python")
    assert third.startswith("-np 1 --host c:1 -x CUDA_VISIBLE_DEVICES=1 python")


def test_different_ssh_ports_become_advice(run, tmp_path):
    code, out, err = run("--cluster", write(tmp_path, OLD_HEADER + "w,a,1,,22,,\nw,b,1,,23,me,\n"))
    assert code == 0
    assert "plm_ssh_args" not in out
    assert "Host b\n  Port 23\n  User me" in err


def test_passwords_are_refused_and_not_repeated(run, tmp_path):
    text = OLD_HEADER + "worker,10.0.0.1,2222,0,2200,me,hunter2\n"
    code, out, err = run("--cluster", write(tmp_path, text))
    assert (code, out) == (2, "")
    assert "ssh-copy-id -p 2200 me@10.0.0.1" in err
    assert "hunter2" not in err


ROLES = """\
worker1 slots=1 role=actor envs=8
gpu1 role=learner
worker2 slots=2 role=actor envs=16
"""


def test_hosts_with_roles_become_mpirun(run, tmp_path):
    code, out, _ = run("--hostfile", write(tmp_path, ROLES), "--", "--env.num-envs", "24")
    learners, actors = shlex.join(shlex.split(out)).split(" : ")
    assert code == 0
    assert "-np 1 --host gpu1:1 -x SPMDRL_ROLE=learner python" in learners
    assert actors.startswith("-np 3 --host worker1:1,worker2:2 -x SPMDRL_ROLE=actor python")
    assert actors.endswith("--env.num-envs 24 --learners 1 --actor-envs 8 8 8")


def test_hosts_with_roles_are_checked_against_the_config(run, tmp_path):
    code, _, err = run("--hostfile", write(tmp_path, ROLES), "--", "--env.num-envs", "32")
    assert code == 2
    assert "actor_envs add up to 24, env.num_envs is 32" in err


def test_the_job_column_of_the_old_csv_is_a_role(run, tmp_path):
    rows = "ps,a,1,-1,22,,\nactor,b,2,,22,,\nlearner,a,2,0,22,,\nactor,c,2,,22,,\n"
    code, out, err = run("--cluster", write(tmp_path, OLD_HEADER + rows))
    assert "1 row(s) of a parameter server left out" in err
    learners, actors = shlex.join(shlex.split(out)).split(" : ")
    assert code == 0
    assert "--host a:1 -x CUDA_VISIBLE_DEVICES=0 -x SPMDRL_ROLE=learner python" in learners
    assert actors.startswith("-np 2 --host b:1,c:1 -x SPMDRL_ROLE=actor python")
    assert actors.endswith("--learners 1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no hosts"),
        ("a role=ps", "line 1: 'ps' is no role; choices: learner, actor"),
        ("a role=actor", "no host has role learner"),
        ("a role=learner", "no host has role actor"),
        ("a role=learner\nb", "b has no role, as others do"),
        ("a role=learner envs=3", "envs=3 is for actors"),
        ("a role=learner\nb slots=4 role=actor envs=3", "b has 4 actors, but envs=3"),
        ("a role=learner\nb role=actor envs=x", "envs is 'x'"),
        ("a slots=0", "slots is '0'"),
        ("a slots=many", "slots is 'many'"),
        ("a cores=3", "'cores=3' is not understood"),
        ("-oProxyCommand=x", "is not a host name"),
        ("$(id)", "is not a host name"),
    ],
)
def test_bad_hostfiles(tmp_path, text, said):
    with pytest.raises(ConfigError) as error:
        hostfile.read_hostfile(write(tmp_path, text))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the first line must name the columns"),
        (OLD_HEADER, "names no hosts"),
        (
            OLD_HEADER + "learner,a,1,,22,,\nactor,b,1,,22,,\nevaluator,c,1,,22,,\n",
            "line 4: 'evaluator' is no role; choices: learner, actor",
        ),
        (OLD_HEADER + "actor,b,1,,22,,\n", "no host has role learner"),
        ("job,ip,gpu\n", "unknown column 'gpu'"),
        (OLD_HEADER + "worker,a,1,0,1,22,,\n", 'several GPUs need quotes: "0,1"'),
        (OLD_HEADER + "worker,a,1,x,22,,\n", "'x' is not a CUDA device"),
        (OLD_HEADER + "worker,a,1,0,seventy,,\n", "ssh_port is 'seventy'"),
        (OLD_HEADER + "worker,a,1,0,22,-oX,\n", "is not a user name"),
        (OLD_HEADER + "worker,a;b,1,0,22,,\n", "is not a host name"),
        (OLD_HEADER + "worker,a,1,0,22,,\nworker,a,1,,22,,\n", "rows with GPUs and rows without"),
        (OLD_HEADER + "worker,a,1,0,22,,\nworker,a,1,1,23,,\n", "two different ssh ports"),
    ],
)
def test_bad_csv(tmp_path, text, said):
    with pytest.raises(ConfigError) as error:
        hostfile.read_cluster(write(tmp_path, text))
    assert said in str(error.value)


def test_submit_needs_a_batch_system(run, tmp_path):
    code, _, err = run("--hostfile", write(tmp_path, "a"), "--submit")
    assert code == 2
    assert "batch system" in err
