"""How a run is described: files, overrides, JSON, sizes, launchers and environment ids."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from spmdrl import tune
from spmdrl.algos import Ppo
from spmdrl.config import (
    Config,
    ConfigError,
    EnvConfig,
    NetConfig,
    SyncConfig,
    changes,
    flatten,
    from_json,
    load,
    to_json,
)
from spmdrl.envs.envpool_loading import load_envpool
from spmdrl.envs.ids import (
    IDS_FILE,
    check_id,
    envpool_families,
    envpool_ids,
    registered_families,
)
from spmdrl.parallel import topology
from spmdrl.parallel.topology import Topology, detect, expand_tasks_per_node
from spmdrl.runtime.rundir import check_run_dir, open_run, read_run
from spmdrl.runtime.validate import nearest_multiples, validate
from spmdrl.train import checked_config, ranks_to_start
from tests.children import CARTPOLE, ROOT

SHIPPED = sorted((ROOT / "configs").glob("*.py"))


# ---------------------------------------------------------------------------------------------
# Files and overrides


def test_a_file_names_the_run():
    config = load([CARTPOLE])
    assert config.name == "cartpole"
    assert config.env.id == "CartPole-v1"
    assert config.run_dir is None


def ppo_of(config: Config) -> Ppo:
    assert isinstance(config.algo, Ppo)
    return config.algo


def test_overrides_change_only_what_they_name():
    base = load([CARTPOLE])
    changed = load([CARTPOLE, "--seed", "3", "--algo.clip-eps", "0.1", "--env.num-envs=16"])
    expected = replace(
        base,
        seed=3,
        algo=replace(ppo_of(base), clip_eps=0.1),
        env=replace(base.env, num_envs=16),
    )
    assert changed == expected


def test_overrides_of_every_kind():
    config = load(
        [
            CARTPOLE,
            *("--net.hidden", "32", "16"),
            *("--algo.target-kl", "0.02"),
            *("--env.normalize-obs", "--algo.no-clip-value"),
            *("--sync.strategy", "gather"),
            *("--env.options", "frame_skip", "4"),
            *("--run-dir", "somewhere"),
        ]
    )
    assert config.net.hidden == (32, 16)
    assert ppo_of(config).target_kl == 0.02
    assert config.env.normalize_obs
    assert not ppo_of(config).clip_value
    assert config.sync.strategy == "gather"
    assert config.env.options == {"frame_skip": 4}
    assert config.run_dir == "somewhere"


def test_none_can_be_given_back(tmp_path):
    file = tmp_path / "kl.py"
    file.write_text(
        "from spmdrl.algos import Ppo\nfrom spmdrl.config import Config\n"
        "config = Config(algo=Ppo(target_kl=0.1))\n"
    )
    assert ppo_of(load([str(file)])).target_kl == 0.1
    assert ppo_of(load([str(file), "--algo.target-kl", "None"])).target_kl is None


def test_a_variant_imports_its_base(tmp_path):
    (tmp_path / "a_base.py").write_text(
        "from spmdrl.config import Config\nconfig = Config(seed=5, total_steps=9000)\n"
    )
    variant = tmp_path / "a_variant.py"
    variant.write_text(
        "from dataclasses import replace\nfrom a_base import config as base\n"
        "config = replace(base, seed=6)\n"
    )
    config = load([str(variant)])
    assert (config.seed, config.total_steps, config.name) == (6, 9000, "a_variant")


def test_get_config_and_a_name_of_its_own(tmp_path):
    file = tmp_path / "made.py"
    file.write_text(
        "from spmdrl.config import Config\ndef get_config():\n    return Config(name='mine')\n"
    )
    assert load([str(file)]).name == "mine"


def test_the_config_cannot_be_changed_by_accident():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 2  # type: ignore[misc]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_configs(file):
    config = load([str(file)])
    validate(config)
    library = config.env.id.partition(":")[0]
    if config.env.backend != "jax" or importlib.util.find_spec(library):  # extras may be missing
        check_id(config.env)
    assert from_json(to_json(config)) == config
    assert file.read_text().startswith('"""'), "opens with what it is and its command"
    assert f"python -m spmdrl.train configs/{file.name}" in file.read_text()


# ---------------------------------------------------------------------------------------------
# JSON


def test_json_keeps_everything():
    config = Config(
        seed=9,
        run_dir="x",
        env=EnvConfig(options={"episodic_life": True, "frame_skip": 4, "p": 0.25, "mode": "a"}),
        net=NetConfig(hidden=()),
        algo=Ppo(target_kl=0.015),
    )
    assert from_json(to_json(config)) == config
    assert isinstance(from_json(to_json(config)).net.hidden, tuple)


def test_json_of_an_older_version_takes_the_defaults():
    values = json.loads(to_json(Config()))
    del values["sync"]["max_skips"], values["eval"]
    assert from_json(json.dumps(values)) == Config()


def test_json_with_an_unknown_field():
    with pytest.raises(ConfigError, match=r"'sede' in Config; did you mean seed\?"):
        from_json('{"sede": 1}')


def test_flat_names_are_those_of_the_command_line():
    flat = flatten(Config(env=EnvConfig(options={"a": 1})))
    assert flat["env.options"] == {"a": 1}
    assert flat["seed"] == 1
    assert "env" not in flat


# ---------------------------------------------------------------------------------------------
# Sizes


def test_derived_sizes():
    config = Config(
        total_steps=10_000,
        env=EnvConfig(num_envs=8),
        algo=Ppo(num_steps=128, minibatches=4),
    )
    assert (config.batch_size, config.num_updates) == (1024, 9)


@pytest.mark.parametrize(
    ("value", "divisor", "expected"),
    [(60, 8, "56, 64"), (3, 8, "8"), (1, 2, "2"), (9, 3, "9, 12"), (128, 3, "126, 129")],
)
def test_nearest_multiples(value, divisor, expected):
    assert nearest_multiples(value, divisor) == expected


def sized(envs: int, **sync) -> Config:
    return Config(env=EnvConfig(num_envs=envs), sync=SyncConfig(**sync))


@pytest.mark.parametrize(
    ("config", "size", "devices"),
    [
        (sized(8), 1, 1),
        (sized(8), 4, 2),
        (sized(10), 4, 1),  # ranks of one device may have different numbers
        (sized(10, strategy="gather"), 4, 1),
        (sized(12, strategy="jax"), 4, 1),
        (sized(16, deterministic=True, shards=8), 2, 2),
    ],
)
def test_sizes_that_work(config, size, devices):
    validate(config, size, devices)


@pytest.mark.parametrize(
    ("config", "size", "devices", "nearest"),
    [
        (sized(10), 1, 4, "8, 12"),
        (sized(10, strategy="jax"), 4, 1, "8, 12"),
        (sized(3), 4, 1, "4"),  # a rank would have none
        (sized(10, deterministic=True, shards=8), 1, 1, "8, 16"),
        (sized(16, deterministic=True, shards=4), 4, 1, "8"),
    ],
)
def test_sizes_that_do_not(config, size, devices, nearest):
    with pytest.raises(ConfigError, match=f"nearest: {nearest}$"):
        validate(config, size, devices)


# ---------------------------------------------------------------------------------------------
# Going on with a run


def test_what_may_change_between_a_run_and_its_resumption():
    before = Config()
    now = replace(
        before,
        total_steps=10**6,
        nprocs=2,
        devices=2,
        run_dir="elsewhere",
        name="other",
        log=replace(before.log, every=10, panel="off"),
        checkpoint=replace(before.checkpoint, every=7, keep=1),
        eval=replace(before.eval, episodes=3),
        env=replace(before.env, threads=2),
    )
    assert changes(before, now) == []


def test_what_may_not():
    before = Config()
    now = replace(
        before,
        seed=2,
        optim=replace(before.optim, lr=1e-3),
        env=replace(before.env, options={"frame_skip": 2}),
        checkpoint=replace(before.checkpoint, renew_every=5),
    )
    assert sorted(changes(before, now)) == [
        "checkpoint.renew_every: 2000 -> 5",
        "env.options: {} -> {'frame_skip': 2}",
        "optim.lr: 0.00025 -> 0.001",
        "seed: 1 -> 2",
    ]


def test_a_run_directory_is_opened_again(tmp_path):
    config = Config(run_dir=str(tmp_path / "deep" / "run"))
    check_run_dir(config)
    assert not (tmp_path / "deep").exists(), "the check changes nothing"
    first = open_run(config)
    again = open_run(replace(config, total_steps=10**6))
    assert (first.resumed, again.resumed) == (False, True)
    assert first.run_id == again.run_id
    assert read_run(again.path).total_steps == 10**6
    assert sorted(p.name for p in again.path.iterdir()) == [".lock", "config.json", "versions.json"]
    with pytest.raises(ConfigError, match="seed: 1 -> 2"):
        check_run_dir(replace(config, seed=2))


def test_restart_moves_the_old_run_aside(tmp_path):
    config = Config(run_dir=str(tmp_path / "run"))
    open_run(config)
    anew = open_run(replace(config, seed=2, restart=True))
    assert not anew.resumed
    assert not read_run(anew.path).restart, "else a resumption would begin anew as well"
    aside = [p for p in tmp_path.iterdir() if p != anew.path]
    assert [read_run(p).seed for p in aside] == [1]


def test_a_run_killed_while_it_made_its_directory_can_start_again(tmp_path):
    open_run(Config(run_dir=str(tmp_path / "run")))
    (tmp_path / "run" / "config.json").unlink()
    assert not open_run(Config(run_dir=str(tmp_path / "run"))).resumed


# ---------------------------------------------------------------------------------------------
# Launchers

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPIEXEC = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SBATCH = {  # the batch script itself: a job, but no step
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
}
SRUN = SBATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "4",
    "SLURM_NODEID": "2",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Topology()),
        (MPIRUN, Topology(3, 4, 1, 2, "mpirun")),
        (MPIEXEC, Topology(2, 4, 0, 2, "mpiexec")),
        (SRUN, Topology(4, 5, 0, 1, "srun")),
        (SRUN | {"SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"},
         Topology(3, 5, 1, 2, "srun")),
        (SRUN | {"PMI_RANK": "4", "PMI_SIZE": "5"}, Topology(4, 5, 0, 1, "srun")),  # --mpi=pmi2
        (SBATCH | MPIRUN, Topology(3, 4, 1, 2, "mpirun")),
        # mpirun starts its daemons by srun, whose variables the ranks then inherit
        (SRUN | MPIRUN, Topology(3, 4, 1, 2, "mpirun")),
        (SBATCH, Topology()),
    ],
    ids=["alone", "mpirun", "mpiexec", "srun", "srun_second_node", "srun_pmi2",
         "mpirun_in_sbatch", "mpirun_by_srun", "sbatch_script"],
)  # fmt: skip
def test_detect(environ, expected):
    assert detect(environ) == expected


def test_nprocs_inside_of_mpirun():
    two = Topology(0, 2, 0, 2, "mpirun")
    assert checked_config([CARTPOLE, "--nprocs", "2"], two).nprocs == 2  # started by --nprocs
    with pytest.raises(ConfigError, match="nprocs is 4, but mpirun has started 2 ranks"):
        checked_config([CARTPOLE, "--nprocs", "4"], two)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2]), ("16(x2)", [16, 16])],
)
def test_expand_tasks_per_node(text, counts):
    assert expand_tasks_per_node(text) == counts


# ---------------------------------------------------------------------------------------------
# Environment ids


def test_the_list_of_ids_is_that_of_the_installed_envpool():
    envpool = load_envpool()
    version = IDS_FILE.read_text().split()[0]
    assert version == envpool.__version__, "spmdrl.envs.ids.write_envpool_ids() renews the list"
    assert envpool_families() == registered_families()
    assert envpool_ids() == sorted(envpool.list_all_envs())


def test_one_family_is_loaded_without_the_others():
    code = """if True:
        import sys
        from spmdrl.envs.envpool_loading import load_envpool
        load_envpool("CartPole-v1").make_spec("CartPole-v1")
        assert "matplotlib" not in sys.modules and "envpool.atari" not in sys.modules
        load_envpool("Pong-v5").make_spec("Pong-v5")
        assert len(load_envpool().list_all_envs()) > 1000
    """
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("envs", "cores", "ranks"),
    [(64, 2, 2), (64, 4, 4), (4, 2, 1), (16, 4, 2), (18, 2, 2), (24, 5, 3), (9, 2, 1)],
)
def test_auto_ranks_share_the_environments_out_evenly(monkeypatch, envs, cores, ranks):
    monkeypatch.setattr(topology, "cores", lambda: cores)
    monkeypatch.setattr(topology, "all_gpus", list)
    config = load([CARTPOLE, "--env.num-envs", str(envs), "--nprocs", "auto"])
    assert ranks_to_start(config, Topology()) == ranks
    assert ranks_to_start(config, Topology(rank=0, size=2, launcher="mpirun")) == 0


def test_auto_is_one_rank_where_there_are_gpus(monkeypatch):
    monkeypatch.setattr(topology, "all_gpus", lambda: ["0", "1"])
    assert topology.auto_ranks(load([CARTPOLE, "--env.num-envs", "64"])) == 1


def test_tune_tries_what_the_machine_and_the_config_allow():
    config = load([CARTPOLE, "--env.num-envs", "6", "--sync.strategy", "jax"])
    assert [(c.nprocs, c.threads) for c in tune.choices(config, 4)] == [
        (1, 1), (1, 4), (2, 1), (2, 2), (3, 1),
    ]  # fmt: skip
