"""mpirun over hosts that only a network connects: training, and what a cut link does."""

import json
import subprocess
import sys

import pytest

import spmdrl.cluster.hostfile
from tests.children import ROOT
from tests.cluster.processes import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

START_S = 300
CARTPOLE = ["configs/cartpole.py", "--log.panel", "off"]


@pytest.fixture
def train(hosts, tmp_path):
    """Start a training run with one rank on each host."""

    def start(*flags: str) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", "spmdrl.train", *CARTPOLE, *flags]
        program += ["--run-dir", str(tmp_path / "run")]
        command = hosts.mpirun({"n1": 1, "n2": 1}, program)
        return hosts.start(command, tmp_path / "out", cwd=ROOT)

    yield start
    hosts.end_programs()


@pytest.fixture
def slow_network(hosts):
    hosts.shape("1gbit", delay_ms=0.5)
    yield hosts
    hosts.heal("n2")
    hosts.shape()


def test_links_have_their_delay_and_can_be_cut(hosts):
    assert 0 < hosts.ping("n1", "n2") < 0.9
    hosts.shape("1gbit", delay_ms=0.5)
    assert hosts.ping("n1", "n2") > 0.9  # there and back
    hosts.cut("n2")
    assert hosts.ping("n1", "n2") == 0
    hosts.heal("n2")
    assert hosts.ping("n1", "n2") > 0.9
    hosts.shape()
    assert 0 < hosts.ping("n1", "n2") < 0.9


@pytest.mark.parametrize("rate", ["50mbit", "200mbit"])
def test_links_have_their_bandwidth(hosts, rate):
    hosts.shape(rate)
    megabytes = 4 if rate == "50mbit" else 16
    receive = hosts.start(hosts.on("n2", sys.executable, "-c", RECEIVE), hosts.root / "receive.log")
    done = subprocess.run(
        hosts.on("n1", sys.executable, "-c", SEND, str(megabytes)), capture_output=True, text=True
    )
    receive.wait(60)
    hosts.shape()
    measured = megabytes * 8.389 / float(done.stdout)
    assert 0.6 < measured / float(rate.removesuffix("mbit")) < 1.2


RECEIVE = """
import socket
with socket.create_server(("", 7001)) as server:
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass
    connection.close()
"""
SEND = """
import socket, sys, time
for attempt in range(100):
    try:
        connection = socket.create_connection(("n2", 7001))
        break
    except OSError:
        time.sleep(0.1)
began = time.perf_counter()
connection.sendall(bytes(int(sys.argv[1]) << 20))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)  # the other side closes when it has read everything
print(time.perf_counter() - began)
"""


@pytest.mark.slow
def test_training_over_a_network(train, slow_network, tmp_path):
    flags = ["--total-steps", "10240"]
    assert train(*flags).wait(START_S) == 0, (tmp_path / "out").read_text()[-3000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    local = tmp_path / "local"
    command = [sys.executable, "-m", "spmdrl.train", *CARTPOLE, *flags, "--nprocs", "2"]
    subprocess.run([*command, "--run-dir", str(local)], cwd=ROOT, check=True, capture_output=True)
    expected = json.loads((local / "summary.json").read_text())
    assert summary["params_sha256"] == expected["params_sha256"]


@pytest.mark.slow
def test_cut_link_is_noticed_by_the_watchdog(train, slow_network, tmp_path):
    limit = 8
    process = train("--total-steps", "50000000", "--sync.phase-timeout-s", str(limit))
    metrics, out = tmp_path / "run/metrics.jsonl", tmp_path / "out"

    def running() -> bool:
        assert process.poll() is None, out.read_text()[-3000:]
        return metrics.exists() and metrics.read_text().count("\n") > 3

    wait_for("training", running, START_S)
    slow_network.cut("n2")
    said = f"longer than its limit of {limit} s"
    wait_for("the watchdog", lambda: said in out.read_text(), limit + 4)
    assert "rank 0 of 2 on n1 has been in update" in out.read_text()
    wait_for("the end of both ranks", lambda: not slow_network.ranks(), 4)


BUSY = "from mpi4py import MPI\nprint('up', flush=True)\nwhile True: MPI.COMM_WORLD.barrier()"


@pytest.mark.slow
def test_mpirun_gives_up_a_host_behind_a_cut_link(hosts, tmp_path, monkeypatch):
    monkeypatch.setattr(spmdrl.cluster.hostfile, "KEEPALIVE", {"time": 2, "intvl": 1, "probes": 3})
    two = [spmdrl.cluster.hostfile.Host("n1"), spmdrl.cluster.hostfile.Host("n2")]
    command = spmdrl.cluster.hostfile.mpirun_over_hosts(two, [sys.executable, "-c", BUSY])
    out = tmp_path / "out"
    process = hosts.start(hosts.on("n1", *command), out)
    wait_for("both ranks", lambda: out.read_text().count("up") == 2, 60)
    hosts.cut("n2")
    try:
        process.wait(20)  # Open MPI 5.0 ends with exit code 0 here, so only its words count
        assert "Remote daemon" in out.read_text()
        assert "n2" in out.read_text()
    finally:
        hosts.heal("n2")
        hosts.end_programs()
