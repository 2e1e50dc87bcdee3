"""A private Slurm on one machine: several nodes, no systemd, no cgroups, nothing shared.

Key, sockets, ports, spool and logs live in one temporary folder. Public names: `SlurmCluster`.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.cluster.processes import (
    MARK,
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

PACKAGES = "slurmctld slurmd slurm-client munge libpmix-dev"
NODE_MARK = "SPMDRL_TEST_NODE"
# Seconds of silence after which a node counts as dead; sites have minutes here. The daemons get a
# higher priority than the jobs, or a busy machine would look dead.
NODE_TIMEOUT = 1
DAEMON_NICE = -15
# Preempted jobs have this long between SIGTERM and SIGKILL.
GRACE = 20
# NODE_FAIL and PREEMPTED are not among them: such a job is queued again a moment later.
FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY"}

CONF = """\
ClusterName=spmdrltest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job may start again only when its old credentials have expired.
AuthInfo=socket={root}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
# Of its own for each node: the PMIx plugin's folders in there would collide.
TmpFS={root}/tmp/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
# Nodes may claim more cores than this machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
SlurmdTimeout={node_timeout}
MessageTimeout=2
TCPTimeout=1
# Jobs have the priority of who submits them, not the daemons'.
PropagatePrioProcess=1
SlurmctldTimeout=30
KillWait=3
MinJobAge=600
MailProg=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
GresTypes=gpu
{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP
PartitionName=normal Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=urgent PriorityTier=10 PreemptMode=OFF GraceTime=0
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} "
    "RealMemory={memory} Gres=gpu:4 State=UNKNOWN"
)


class SlurmCluster:
    """munged, slurmctld and one slurmd for each of the nodes n1, n2, ..."""

    def __init__(self, nodes: int = 4, cpus: int = 4):
        need_commands(PACKAGES, "munged", "slurmctld", "slurmd", "sbatch", "srun")
        self.names = [f"n{i}" for i in range(1, nodes + 1)]
        self.root = make_folder("slurm")
        self.env = os.environ | {
            "SLURM_CONF": str(self.root / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{search_path()}",
            MARK: str(self.root),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._write_files(cpus)
            self._start()
        except BaseException:
            self.stop()
            raise

    def _write_files(self, cpus: int) -> None:
        for name in ["log", "state", *(f"{d}/{n}" for d in ("spool", "tmp") for n in self.names)]:
            (self.root / name).mkdir(parents=True)
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 9 // 10 // 2**20
        host, ports = socket.gethostname().split(".")[0], free_ports(len(self.names) + 1)
        lines = [
            NODE.format(name=name, host=host, port=port, cpus=cpus, memory=memory)
            for name, port in zip(self.names, ports[1:], strict=True)
        ]
        text = CONF.format(
            host=host, port=ports[0], root=self.root, node_timeout=NODE_TIMEOUT, grace=GRACE,
            nodes="\n".join(lines),
        )  # fmt: skip
        (self.root / "slurm.conf").write_text(text)
        for i in range(4):  # stand-ins, so that Slurm hands out CUDA_VISIBLE_DEVICES
            os.mknod(self.root / f"gpu{i}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        (self.root / "gres.conf").write_text(f"Name=gpu File={self.root}/gpu[0-3]\n")
        # Named, because slurmd gives up when it has to guess and finds no cgroup mounted.
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start(self) -> None:
        at = self.root
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={at}/munge.key", "--num-threads=2",
            f"--socket={at}/munge.socket", f"--pid-file={at}/munge.pid",
            f"--log-file={at}/log/munge.log", f"--seed-file={at}/munge.seed",
        )  # fmt: skip
        wait_for("munged's socket", (at / "munge.socket").exists, 20)
        self._daemon("slurmctld", "-D")
        for name in self.names:
            self.start_node(name)
        try:
            wait_for("all nodes idle", lambda: self.idle_nodes() == len(self.names), 60)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.logs()}") from None

    def _daemon(self, *command: str, key: str = "", **env: str) -> None:
        log = self.root / "log" / f"{key or command[0]}.out"
        urgent = ["nice", "-n", str(DAEMON_NICE), *command]
        self._daemons[key or command[0]] = start_daemon(urgent, log, self.env | env)

    # ---------------------------------------------------------------------------------------
    # Nodes

    def start_node(self, name: str) -> None:
        self._daemon("slurmd", "-D", "-N", name, key=name, **{NODE_MARK: name})

    def kill_daemon(self, name: str) -> None:
        """SIGKILL to the node's slurmd only; what runs there goes on for the time being."""
        self._daemons[name].kill()
        self._daemons[name].wait()

    def crash_node(self, name: str) -> None:
        """SIGKILL to everything on the node, as a power cut would end it."""
        self.kill_daemon(name)
        end_all(lambda env: self._runs_on(env, name))

    def revive_nodes(self) -> None:
        """Start the daemons that were killed, and wait until Slurm uses their nodes again."""
        dead = [name for name in self.names if self._daemons[name].poll() is not None]
        for name in dead:
            self.start_node(name)
        for name in dead:
            wait_for(f"{name} back", partial(self._is_up, name), 60)

    def _is_up(self, name: str) -> bool:
        return self.node_state(name) in {"IDLE", "ALLOCATED", "MIXED"}

    def _runs_on(self, env: dict[str, str], name: str) -> bool:
        node = env.get("SLURMD_NODENAME", env.get(NODE_MARK))
        return env.get("SLURM_CONF") == self.env["SLURM_CONF"] and node == name

    def idle_nodes(self) -> int:
        return len(self.run("sinfo", "-hN", "-p", "normal", "-t", "idle", "-o", "%N").split())

    def node_state(self, name: str) -> str:
        found = re.search(r"State=(\w+)", self.run("scontrol", "show", "node", name))
        return found[1] if found else "UNKNOWN"

    # ---------------------------------------------------------------------------------------
    # Jobs

    def run(self, *command: str, check: bool = False, **kwargs: Any) -> str:
        """Standard output of a Slurm command."""
        done = self.call(*command, **kwargs)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout

    def call(
        self, *command: str, timeout: float = 120, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.env | env, cwd=cwd, text=True, capture_output=True, timeout=timeout
        )

    def sbatch(self, *arguments: str, cwd: Path, **env: Any) -> str:
        """Submit; the job's id."""
        done = self.call("sbatch", "--parsable", *arguments, cwd=cwd, **env)
        if done.returncode:
            raise RuntimeError(f"sbatch {' '.join(arguments)}: {done.stderr}")
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        text = self.run("scontrol", "-o", "show", "job", job)
        return dict(item.split("=", 1) for item in text.split() if "=" in item)

    def state(self, job: str) -> str:
        return self.job(job).get("JobState", "UNKNOWN")

    def wait(self, job: str, *states: str, timeout: float = 120) -> float:
        """Seconds until the job is in one of the states; an end that is not among them raises."""

        def arrived() -> bool:
            now = self.state(job)
            if now not in states and now in FINAL:
                raise RuntimeError(f"job {job} ended as {now}\n{self.output(job)}\n{self.logs()}")
            return now in states

        try:
            return wait_for(f"job {job} {'/'.join(states)}", arrived, timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it is {self.job(job)}\n{self.output(job)}") from None

    def nodes_of(self, job: str) -> list[str]:
        return self.run("scontrol", "show", "hostnames", self.job(job)["NodeList"]).split()

    def restarts(self, job: str) -> int:
        return int(self.job(job).get("Restarts", 0))

    def output(self, job: str) -> str:
        file = Path(self.job(job).get("StdOut", "/nonexistent"))
        return file.read_text()[-6000:] if file.is_file() else f"no output {file}"

    def task_ids(self, job: str, rank: int) -> list[int]:
        """Processes of one rank, by the variables that srun gave it."""
        wanted = {"SLURM_CONF": self.env["SLURM_CONF"], "SLURM_JOB_ID": job}
        wanted |= {"SLURM_PROCID": str(rank), "SLURM_STEP_ID": "0"}
        return [pid for pid, env in environments() if wanted.items() <= env.items()]

    def logs(self) -> str:
        """The last complaints of the daemons."""
        found = []
        for file in sorted((self.root / "log").glob("*.log")):
            lines = [x for x in file.read_text().splitlines() if "error" in x.lower()]
            found += [f"{file.name}: {line}" for line in lines[-5:]]
        return "\n".join(found)

    def stop(self) -> None:
        """End jobs, then the daemons, then whatever is left, by their ids."""
        controller = self._daemons.get("slurmctld")
        if controller and controller.poll() is None:
            self.run("scancel", "--signal=KILL", "--full", "-u", "root")
        stop_daemons([d for name, d in self._daemons.items() if name != "munged"])
        stop_daemons(list(self._daemons.values()))
        end_all(lambda env: env.get("SLURM_CONF") == self.env["SLURM_CONF"])
        remove_folder(self.root)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
