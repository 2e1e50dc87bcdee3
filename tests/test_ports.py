"""A run on one machine listens on the loopback only."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from spmdrl.parallel.ports import BTL, confine_launcher, confine_rank
from spmdrl.parallel.topology import Topology
from tests.faults.listening import WAYS, _is_loopback, listeners, open_ports, trial
from tests.faults.result import Bench

# As the launcher does it: opened to all, one after the other, and served by a thread that waits.
SERVER = """
import select, socket, sys, time
opened = []
for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
    server = socket.socket(family)
    server.setblocking(False)
    if family == socket.AF_INET6:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    server.bind((host, 0))
    server.listen()
    opened.append(server)
    time.sleep(0.2)
print(*[server.getsockname()[1] for server in opened], flush=True)
while True:
    for ready in select.select(opened, [], [])[0]:
        ready.accept()[0].sendall(b"served")
"""


@pytest.fixture
def server():
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    _, said = process.communicate()
    assert said == ""


def test_a_child_that_listens_to_all_goes_on_listening_on_the_loopback(server):
    confine_launcher(server.pid).join()
    assert server.stdout is not None
    ports = [int(word) for word in server.stdout.readline().split()]
    found = {(address, port) for _, address, port in listeners([server.pid])}
    assert found == {("127.0.0.1", ports[0]), ("::1", ports[1])}
    assert not open_ports([server.pid])
    for host, port in (("127.0.0.1", ports[0]), ("::1", ports[1])):
        with socket.create_connection((host, port), timeout=5) as connection:
            assert connection.recv(10) == b"served"


def test_listening_to_all_would_be_seen():
    with socket.create_server(("", 0)) as server, socket.create_server(("127.0.0.1", 0)) as local:
        pid = _own_pid()
        ports = {port for _, _, port in open_ports([pid])}
        assert server.getsockname()[1] in ports
        assert local.getsockname()[1] not in ports


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("0.0.0.0", False),
        ("::", False), ("::ffff:192.0.2.1", False), ("192.0.2.1", False),
    ],
)  # fmt: skip
def test_what_is_loopback(address, local):
    assert _is_loopback(address) is local


def _own_pid() -> int:
    return int(Path("/proc/self").resolve().name)


def test_a_process_that_has_ended_is_no_error():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    confine_launcher(done.pid).join()


def test_ranks_of_one_machine_need_no_tcp_and_others_do():
    def transports(topology: Topology, **given: str) -> str | None:
        confine_rank(topology, given)
        return given.get(BTL)

    assert transports(Topology(1, 2, 1, 2, "mpirun")) == "^tcp"
    assert transports(Topology(1, 4, 1, 2, "mpirun")) is None
    assert transports(Topology()) is None
    assert transports(Topology(1, 2, 1, 2, "mpirun"), **{BTL: "self,sm"}) == "self,sm"


@pytest.mark.nightly  # the slow one below shows most of it
@pytest.mark.timeout(200)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_listens_on_the_loopback_only(way):
    with tempfile.TemporaryDirectory() as folder:
        result = trial(way, 0, random.Random(0), Bench(Path(folder)))
    assert result.held, result.why


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give this host another address")
def test_gloo_listens_on_the_loopback_where_the_name_of_the_host_leads_elsewhere(tmp_path):
    """As on most clusters: the host's name is that of a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.99", 9))  # nothing is sent
        except OSError:
            pytest.skip("this machine has no network")
        address = probe.getsockname()[0]
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
    mount = f"mount --bind {tmp_path}/hosts /etc/hosts"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode != 0:
        pytest.skip("mounts are not allowed here")
    inside = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    result = trial("jax", 0, random.Random(0), Bench(tmp_path), inside)
    assert result.held, result.why
