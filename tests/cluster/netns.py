"""Several "hosts" on one machine: network namespaces with their own address, name and link.

Each host hangs on a switch by a link whose bandwidth (tc tbf) and delay (netem, or a switch in user
space where the kernel has none) can be set, and which can be cut. The machine's own network is not
touched. Public names: `NamespaceCluster`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.cluster.processes import (
    MARK,
    MissingError,
    end_all,
    environments,
    make_folder,
    need_commands,
    remove_folder,
    search_path,
    start_daemon,
    stop_daemons,
    wait_for,
)

NAMESPACE = re.compile(r"spmdrl(\d+)-\w+")  # the number is the owner's process id
AGENT = """\
#!/bin/bash
# Stands in for ssh: AGENT [options] HOST COMMAND...
while [ "${1#-}" != "$1" ]; do shift; done
case $1 in 10.78.0.*) host=n${1##*.} ;; *) host=$1 ;; esac
shift
exec ip netns exec "PREFIX-$host" unshare --uts \\
  bash -c 'hostname "$0" && exec bash -c "$*"' "$host" "$@"
"""


def run(*command: str, check: bool = True) -> str:
    env = os.environ | {"PATH": search_path()}
    done = subprocess.run(command, text=True, capture_output=True, env=env)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class NamespaceCluster:
    """Hosts n1, n2, ... with the addresses 10.78.0.1, 10.78.0.2, ..."""

    def __init__(self, hosts: int = 2):
        need_commands("iproute2 util-linux", "ip", "tc", "unshare", "setpriv")
        self.names = [f"n{i}" for i in range(1, hosts + 1)]
        self._prefix = f"spmdrl{os.getpid()}"
        self._switch: subprocess.Popen[bytes] | None = None
        self._programs: list[subprocess.Popen[bytes]] = []
        clear_namespaces()
        self.root = make_folder("netns")
        self.env = os.environ | {"PATH": search_path(), MARK: str(self.root)}
        try:
            self._build()
        except RuntimeError as error:
            self.stop()
            raise MissingError(f"network namespaces do not work here: {error}") from error

    def namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _build(self) -> None:
        switch = self.namespace("switch")
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        lines = [f"10.78.0.{i} {name}" for i, name in enumerate(self.names, start=1)]
        for i, name in enumerate(self.names, start=1):
            self._add_host(name, f"10.78.0.{i}/24", "\n".join(["127.0.0.1 localhost", *lines]))
        self.agent = self.root / "agent"
        self.agent.write_text(AGENT.replace("PREFIX", self._prefix))
        self.agent.chmod(0o755)

    def _add_host(self, name: str, address: str, hosts: str) -> None:
        space, switch = self.namespace(name), self.namespace("switch")
        # `ip netns exec` shows these files as the namespace's own /etc/hosts
        etc = Path("/etc/netns") / space
        etc.mkdir(parents=True)
        (etc / "hosts").write_text(hosts + "\n")
        run("ip", "netns", "add", space)
        run("ip", "-n", space, "link", "set", "lo", "up")
        pair = ["type", "veth", "peer", "name", "eth0", "netns", space]
        run("ip", "-n", switch, "link", "add", name, *pair)
        run("ip", "-n", space, "addr", "add", address, "dev", "eth0")
        run("ip", "-n", space, "link", "set", "eth0", "up")
        run("ip", "-n", switch, "link", "set", name, "master", "br0", "up")

    # ---------------------------------------------------------------------------------------
    # Links

    def shape(self, rate: str = "", delay_ms: float = 0.0) -> None:
        """Limit every link in both directions, and delay every frame once on its way."""
        self._unshape()
        netem = delay_ms > 0 and self.has_netem()
        for name in self.names:
            ends = [(self.namespace(name), "eth0"), (self.namespace("switch"), name)]
            if netem:
                self._qdisc(*ends.pop(0), "netem", "delay", f"{delay_ms}ms", "limit", "20000")
            for end in ends if rate else []:
                self._qdisc(*end, "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        if delay_ms > 0 and not netem:
            self._start_switch(delay_ms / 1000)
        self.wait_links()

    def wait_links(self) -> None:
        """Until every host hears the first one; links need a moment after a change."""
        for name in self.names[1:]:
            wait_for(f"link to {name}", partial(self._hears_first, name), 20)

    def _hears_first(self, name: str) -> bool:
        return self.ping(self.names[0], name) > 0

    def _qdisc(self, space: str, device: str, *words: str) -> None:
        run("tc", "-n", space, "qdisc", "add", "dev", device, "root", *words)

    def _unshape(self) -> None:
        if self._switch:
            stop_daemons([self._switch])
            self._switch = None
        for name in self.names:
            for space, device in [(self.namespace(name), "eth0"), (self.namespace("switch"), name)]:
                run("tc", "-n", space, "qdisc", "del", "dev", device, "root", check=False)
            run("ip", "-n", self.namespace("switch"), "link", "set", name, "master", "br0")

    def has_netem(self) -> bool:
        space = self.namespace("switch")
        try:
            self._qdisc(space, "br0", "netem", "delay", "1ms")
        except RuntimeError:
            return False
        run("tc", "-n", space, "qdisc", "del", "dev", "br0", "root")
        return True

    def _start_switch(self, delay: float) -> None:
        space = self.namespace("switch")
        for name in self.names:
            run("ip", "-n", space, "link", "set", name, "nomaster")
        program = [sys.executable, str(Path(__file__).with_name("delay_switch.py")), str(delay)]
        command = ["ip", "netns", "exec", space, *program, *self.names]
        self._switch = start_daemon(command, self.root / "switch.log", self.env)

    def cut(self, name: str) -> None:
        run("ip", "-n", self.namespace("switch"), "link", "set", name, "down")

    def heal(self, name: str) -> None:
        run("ip", "-n", self.namespace("switch"), "link", "set", name, "up")
        self.wait_links()

    def ping(self, source: str, target: str) -> float:
        """Milliseconds there and back, the shortest of several tries; 0 when nothing comes back."""
        program = [sys.executable, "-c", PING, f"10.78.0.{target[1:]}"]
        done = subprocess.run(self.on(source, *program), text=True, capture_output=True)
        return float(done.stdout) if done.returncode == 0 else 0.0

    # ---------------------------------------------------------------------------------------
    # Programs

    def on(self, name: str, *command: str) -> list[str]:
        """The command that runs `command` on a host."""
        named = ["unshare", "--uts", "bash", "-c", 'hostname "$0" && exec "$@"', name]
        return ["ip", "netns", "exec", self.namespace(name), *named, *command]

    def mpirun(self, slots: dict[str, int], program: Sequence[str]) -> list[str]:
        """mpirun on the first host, which starts ranks on all of them through the agent."""
        command = ["mpirun", "--allow-run-as-root", "--bind-to", "none"]
        # Interfaces by network, so that nobody offers the loopback to another host.
        command += ["--prtemca", "prte_if_include", "10.78.0.0/24"]
        command += ["--mca", "btl_tcp_if_include", "10.78.0.0/24"]
        command += ["-np", str(sum(slots.values()))]
        command += ["--host", ",".join(f"{name}:{count}" for name, count in slots.items())]
        return self.on(next(iter(slots)), *command, *program)

    def start(
        self, command: Sequence[str], log: Path, cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        env = self.env | {"PATH": own_path(), "PRTE_MCA_plm_ssh_agent": str(self.agent)}
        self._programs.append(start_daemon(command, log, env, cwd=cwd))
        return self._programs[-1]

    def ranks(self) -> list[int]:
        """Processes that mpirun started on any host."""
        return [pid for pid, env in environments() if self._is_rank(env)]

    def _is_rank(self, env: dict[str, str]) -> bool:
        return env.get(MARK) == str(self.root) and "OMPI_COMM_WORLD_RANK" in env

    def end_programs(self) -> None:
        """End everything that was started here, but for the switch."""
        kept = self._switch.pid if self._switch else 0
        end_all(lambda env: env.get(MARK) == str(self.root), but=kept)
        while self._programs:
            self._programs.pop().wait()

    def stop(self) -> None:
        self.end_programs()
        if self._switch:
            stop_daemons([self._switch])
        for name in [*self.names, "switch"]:
            remove_namespace(self.namespace(name))
        remove_folder(self.root)


# A connection to a closed port: the refusal takes one round trip.
PING = """
import socket, sys, time
best = 1e9
for _ in range(5):
    probe = socket.socket()
    probe.settimeout(1.0)
    began = time.perf_counter()
    try:
        probe.connect((sys.argv[1], 9))
    except ConnectionRefusedError:
        best = min(best, time.perf_counter() - began)
    except OSError:
        sys.exit(1)
print(best * 1000)
"""


def own_path() -> str:
    """PATH with the tools of this Python's environment first."""
    return f"{Path(sys.executable).parent}:{search_path()}"


def clear_namespaces() -> None:
    """Remove what a session left that was killed before it could clean up."""
    for line in run("ip", "netns", "list", check=False).splitlines():
        found = NAMESPACE.match(line)
        if found and not Path(f"/proc/{found[1]}").exists():
            remove_namespace(found[0])


def remove_namespace(space: str) -> None:
    for pid in run("ip", "netns", "pids", space, check=False).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    run("ip", "netns", "del", space, check=False)
    shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
    with contextlib.suppress(OSError):
        Path("/etc/netns").rmdir()
