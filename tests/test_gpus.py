"""Which GPUs a rank takes, by numbers, UUIDs and parts; and their memory where ranks share one."""

import pytest

from spmdrl.parallel import gpus
from spmdrl.parallel.gpus import gpu_settings
from spmdrl.parallel.process import settings
from spmdrl.parallel.topology import LaunchError, Topology

VISIBLE, FRACTION = gpus.VISIBLE, gpus.FRACTION


def of_ranks(ranks, devices=0, machine=(), launcher="mpirun", **environ):
    """What each local rank sets."""
    return [
        gpu_settings(Topology(r, ranks, r, ranks, launcher), devices, environ, machine)
        for r in range(ranks)
    ]


def seen(found):
    return [one.get(VISIBLE) for one in found]


def test_one_rank_takes_all_that_is_there():
    assert of_ranks(1, machine=["0", "1"]) == [{}]
    assert of_ranks(1, CUDA_VISIBLE_DEVICES="2,3") == [{}]


def test_nothing_is_set_where_there_is_no_gpu():
    assert of_ranks(2) == [{}, {}]
    assert of_ranks(2, machine=["0"], CUDA_VISIBLE_DEVICES="") == [{}, {}]
    assert of_ranks(2, machine=["0"], CUDA_VISIBLE_DEVICES="-1") == [{}, {}]


def test_ranks_divide_the_gpus():
    assert seen(of_ranks(2, machine="0123")) == ["0,1", "2,3"]
    assert seen(of_ranks(2, devices=1, machine="0123")) == ["0", "1"]
    assert seen(of_ranks(2, CUDA_VISIBLE_DEVICES="5, 7")) == ["5", "7"]
    assert all(FRACTION not in one for one in of_ranks(2, machine="01"))


@pytest.mark.parametrize("kind", ["GPU-1a2b", "MIG-1a2b", "MIG-GPU-1a2b/1"])
def test_gpus_by_name(kind):
    names = [f"{kind}-{i}" for i in range(4)]
    assert seen(of_ranks(4, CUDA_VISIBLE_DEVICES=",".join(names))) == names
    # one of them, shared by two ranks
    shared = of_ranks(2, CUDA_VISIBLE_DEVICES=names[0])
    assert seen(shared) == [names[0]] * 2


def test_ranks_on_one_gpu_share_its_memory():
    found = of_ranks(4, CUDA_VISIBLE_DEVICES="0")
    assert found == [{VISIBLE: "0", FRACTION: "0.200"}] * 4
    assert sum(float(one[FRACTION]) for one in found) < 1


def test_ranks_are_spread_over_too_few_gpus():
    found = of_ranks(3, machine="01")
    assert seen(found) == ["0", "0", "1"]
    assert [one.get(FRACTION) for one in found] == ["0.400", "0.400", None]
    assert seen(of_ranks(4, devices=1, machine="01")) == ["0", "0", "1", "1"]


@pytest.mark.parametrize("name", gpus.MEMORY)
def test_who_has_set_the_memory_keeps_it(name):
    environ = {name: "0.3", VISIBLE: "0"}
    assert gpu_settings(Topology(1, 2, 1, 2), 0, environ, []) == {VISIBLE: "0"}


def test_srun_may_have_given_every_rank_its_own():
    """Then all of them are this rank's, and the list of a rank says nothing about the others."""
    bound = {"launcher": "srun", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert of_ranks(2, SLURM_GPUS_PER_TASK="2", **bound) == [{}, {}]
    assert of_ranks(2, SLURM_TRES_PER_TASK="cpu=4,gres/gpu=2", **bound) == [{}, {}]
    assert seen(of_ranks(2, SLURM_TRES_PER_TASK="cpu=4", **bound)) == ["0", "1"]
    shared = of_ranks(2, launcher="srun", SLURM_NTASKS_PER_GPU="2", CUDA_VISIBLE_DEVICES="0")
    assert shared == [{FRACTION: "0.400"}] * 2
    # mpirun inside such a job gives every rank the same list
    inside = of_ranks(2, SLURM_GPUS_PER_TASK="2", CUDA_VISIBLE_DEVICES="0,1")
    assert seen(inside) == ["0", "1"]


def test_too_few_gpus_are_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(gpus, "jax_drives_gpus", lambda environ: True)
    with pytest.raises(LaunchError, match="2 ranks of 2 GPUs each need 4, but this machine has 3"):
        of_ranks(2, devices=2, machine="012")


def test_a_jax_for_processors_has_its_own_devices():
    assert not gpus.jax_drives_gpus({"JAX_PLATFORMS": "cpu"})
    found = of_ranks(2, devices=2, machine="012", JAX_PLATFORMS="cpu")
    assert found == [{}, {}]


def test_the_log_shows_what_was_set(monkeypatch):
    monkeypatch.setenv(FRACTION, "0.400")
    monkeypatch.setenv(VISIBLE, "GPU-1a2b")
    shown = settings(1)
    assert "CUDA_VISIBLE_DEVICES=GPU-1a2b" in shown
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.400" in shown
