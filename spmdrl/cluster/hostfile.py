"""Machines without a batch system: lists of hosts, and the mpirun command for them.

Reads `host slots=N` files and the CSV of older systems with the header
`job,ip,tf_port,cuda_visible_devices,ssh_port,ssh_username,ssh_password`. In both, machines can have
a role: learner or actor.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from spmdrl.config import ConfigError, suggest
from spmdrl.parallel.ids import split_ids
from spmdrl.parallel.roles import ROLE_MARK
from spmdrl.runtime.files import read_plain

__all__ = [
    "Host", "as_text", "mpirun_over_hosts", "read_cluster", "read_hostfile", "role_flags",
    "ssh_advice",
]  # fmt: skip

HEADER = (
    "job",
    "ip",
    "tf_port",
    "cuda_visible_devices",
    "ssh_port",
    "ssh_username",
    "ssh_password",
)
LARGEST_LIST = 1 << 22  # bytes: a hundred thousand hosts
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
# After `time` silent seconds mpirun probes a host every `intvl` seconds, `probes` times, then gives
# it up and ends the job. By default that would take many minutes.
KEEPALIVE = {"time": 10, "intvl": 5, "probes": 4}


@dataclass(frozen=True)
class Host:
    """A machine, how many ranks it takes, and how ssh reaches it."""

    name: str
    slots: int = 1
    gpus: tuple[str, ...] = ()
    port: int = 22
    user: str = ""
    role: str = ""  # learner or actor, where ranks do not do both
    envs: int = 0  # of all its actors; 0: an even share


def read_hostfile(path: str) -> list[Host]:
    """One line per host: `name`, `name slots=4` or `name:4`; # begins a comment.

    `role=learner` or `role=actor` after it, and with actor `envs=16`, the machine's environments.
    """
    hosts = []
    for where, line in _lines(path):
        text = line.split("#")[0].split()
        if text:
            hosts.append(_parse_host(where, text))
    return _merge(path, hosts)


def _parse_host(where: str, words: Sequence[str]) -> Host:
    name, _, slots = words[0].partition(":")
    given = {"slots": slots or "1", "role": "", "envs": ""}
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key in given:
            given[key] = value
        elif key not in ("max_slots", "max-slots"):
            raise ConfigError(f"{where}: {word!r} is not understood; write `host slots=N`")
    role = _role(where, given["role"]) if given["role"] else ""
    envs = _number(where, "envs", given["envs"], 1, 1 << 20) if given["envs"] else 0
    if envs and role != "actor":
        raise ConfigError(f"{where}: envs={envs} is for actors; write `role=actor envs={envs}`")
    slots_found = _number(where, "slots", given["slots"], 1, 4096)
    return Host(_name(where, name), slots_found, role=role, envs=envs)


ROLES = ("learner", "actor")


def _role(where: str, text: str) -> str:
    if text not in ROLES:
        raise ConfigError(f"{where}: {text!r} is no role; choices: {', '.join(ROLES)}")
    return text


def read_cluster(path: str) -> list[Host]:
    """Hosts of the old CSV: one row per process; a slot for each of its GPUs, or one."""
    # Each line by itself: a quoted line break would join the names of two hosts.
    rows = (cells for _, line in _lines(path) for cells in csv.reader([line]))
    header = [cell.strip() for cell in next(rows, [])]
    _check_header(path, header)
    hosts = []
    for number, row in enumerate(rows, start=2):
        if any(cell.strip() for cell in row):
            where = f"{path}, line {number}"
            hosts.append((where, _job(header, row), _parse_row(where, header, row)))
    if all(job != "actor" for _, job, _ in hosts):  # then every process does both
        return _merge(path, [host for _, _, host in hosts])
    kept = [(where, job, host) for where, job, host in hosts if job != "ps"]
    if servers := len(hosts) - len(kept):
        said = f"{path}: {servers} row(s) of a parameter server left out: there is none here"
        print(said, file=sys.stderr)
    return _merge(path, [replace(host, role=_role(where, job)) for where, job, host in kept])


def _job(header: Sequence[str], row: Sequence[str]) -> str:
    return dict(zip(header, row, strict=False)).get("job", "").strip()


def _check_header(path: str, header: Sequence[str]) -> None:
    for name in header:
        if name not in HEADER:
            raise ConfigError(f"{path}: unknown column {name!r}{suggest(name, HEADER)}")
    if "ip" not in header:
        raise ConfigError(f"{path}: the first line must name the columns: {','.join(HEADER)}")


def _parse_row(where: str, header: Sequence[str], row: Sequence[str]) -> Host:
    if len(row) != len(header):
        raise ConfigError(
            f'{where}: {len(row)} values for {len(header)} columns; several GPUs need quotes: "0,1"'
        )
    cell = {name: value.strip() for name, value in zip(header, row, strict=True)}
    name = _name(where, cell["ip"])
    user, port = cell.get("ssh_username", ""), cell.get("ssh_port", "") or "22"
    if user and not USER.fullmatch(user):
        raise ConfigError(f"{where}: {user!r} is not a user name")
    if cell.get("ssh_password"):
        raise ConfigError(
            f"{where}: passwords in files are refused. Set up a key once, with `ssh-copy-id "
            f"-p {port} {user + '@' if user else ''}{name}`, and leave ssh_password empty"
        )
    gpus = _gpus(where, cell.get("cuda_visible_devices", ""))
    return Host(name, len(gpus) or 1, gpus, _number(where, "ssh_port", port, 1, 65535), user)


def _gpus(where: str, text: str) -> tuple[str, ...]:
    """Device ids; none for the empty text and for -1, which hides all of them."""
    ids = tuple(part for part in re.split(r"[\s,;]+", text) if part)
    if ids == ("-1",):
        return ()
    for part in ids:
        if not re.fullmatch(r"\d+|(GPU|MIG)-[A-Za-z0-9-/]+", part):
            raise ConfigError(f"{where}: {part!r} is not a CUDA device")
    return ids


def _lines(path: str) -> Iterable[tuple[str, str]]:
    try:
        text = read_plain(Path(path), LARGEST_LIST).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return [(f"{path}, line {i}", line) for i, line in enumerate(text.splitlines(), start=1)]


def _name(where: str, text: str) -> str:
    if not NAME.fullmatch(text):
        raise ConfigError(f"{where}: {text!r} is not a host name or address")
    return text


def _number(where: str, name: str, text: str, low: int, high: int) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise ConfigError(f"{where}: {name} is {text!r}, but must be from {low} to {high}")
    return int(text)


def _merge(path: str, hosts: Sequence[Host]) -> list[Host]:
    """One entry per machine, in the order of the file; several rows add their slots."""
    merged: dict[tuple[str, str], Host] = {}
    for host in sorted(hosts, key=lambda host: host.role == "actor"):  # learners come first
        new = replace(host, slots=0, gpus=(), envs=0)
        before = merged.setdefault((host.name, host.role), new)
        if (before.port, before.user) != (host.port, host.user):
            raise ConfigError(f"{path}: {host.name} has two different ssh ports or users")
        gpus, envs = before.gpus + host.gpus, before.envs + host.envs
        slots = before.slots + host.slots
        merged[host.name, host.role] = replace(before, slots=slots, gpus=gpus, envs=envs)
    for host in merged.values():
        if host.gpus and len(host.gpus) != host.slots:
            raise ConfigError(f"{path}: {host.name} has rows with GPUs and rows without")
    if not merged:
        raise ConfigError(f"{path} names no hosts")
    _check_roles(path, list(merged.values()))
    return list(merged.values())


def _check_roles(path: str, hosts: Sequence[Host]) -> None:
    if not any(host.role for host in hosts):
        return
    for host in hosts:
        if not host.role:
            raise ConfigError(
                f"{path}: {host.name} has no role, as others do; choices: {', '.join(ROLES)}"
            )
    for role in ROLES:
        if role not in {host.role for host in hosts}:
            raise ConfigError(f"{path}: no host has role {role}; give one of them role={role}")
    actors = [host for host in hosts if host.role == "actor"]
    if any(host.envs for host in actors):
        for host in actors:
            if host.envs < host.slots:
                raise ConfigError(
                    f"{path}: {host.name} has {host.slots} actors, but envs="
                    f"{host.envs}; give every actor at least one, or leave envs out"
                )


def role_flags(hosts: Sequence[Host]) -> list[str]:
    """What the training has to be told about the roles of its ranks."""
    if not any(host.role for host in hosts):
        return []
    flags = ["--learners", str(sum(host.slots for host in hosts if host.role == "learner"))]
    actors = [host for host in hosts if host.role == "actor"]
    if not any(host.envs for host in actors):
        return flags
    shares = [len(part) for host in actors for part in split_ids(host.envs, host.slots)]
    return [*flags, "--actor-envs", *map(str, shares)]


# ---------------------------------------------------------------------------------------------
# The command


def mpirun_over_hosts(hosts: Sequence[Host], program: Sequence[str]) -> list[str]:
    """mpirun over the hosts; a part for each run of hosts of one role that show the same GPUs."""
    if ":" in program:
        raise ConfigError("a word that is only ':' would begin a new part of the mpirun command")
    command = ["mpirun", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), *_ssh_args(hosts)]
    for name, value in KEEPALIVE.items() if len(hosts) > 1 else []:
        command += ["--prtemca", f"oob_tcp_keepalive_{name}", str(value)]
    # An actor has as many cores as its machine; plain ranks one each.
    plain = _same(h.gpus for h in hosts) and not hosts[0].gpus and not hosts[0].role
    command += ["--bind-to", "core" if plain else "none"]
    parts = groupby(hosts, key=lambda host: (host.gpus, host.role))
    for number, ((gpus, role), part) in enumerate(parts):
        command += [":"] if number else []
        command += _part(list(part), gpus, role, program)
    return command


def _part(
    hosts: Sequence[Host], gpus: Sequence[str], role: str, program: Sequence[str]
) -> list[str]:
    words = ["-np", str(sum(host.slots for host in hosts))]
    words += ["--host", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    words += ["-x", f"CUDA_VISIBLE_DEVICES={','.join(gpus)}"] if gpus else []
    words += ["-x", f"{ROLE_MARK}={role}"] if role else []
    return [*words, *program]


def _ssh_args(hosts: Sequence[Host]) -> list[str]:
    """Port and user for mpirun's ssh, when they are the same everywhere."""
    if not _same((host.port, host.user) for host in hosts):
        return []
    words = ["-p", str(hosts[0].port)] if hosts[0].port != 22 else []
    words += ["-l", hosts[0].user] if hosts[0].user else []
    return ["--prtemca", "plm_ssh_args", " ".join(words)] if words else []


def _same(values: Iterable[object]) -> bool:
    return len(set(values)) <= 1


def ssh_advice(hosts: Sequence[Host]) -> str:
    """Lines for ~/.ssh/config, when hosts differ in port or user and mpirun cannot be told."""
    if _same((host.port, host.user) for host in hosts):
        return ""
    blocks = []
    for host in hosts:
        user = f"\n  User {host.user}" if host.user else ""
        blocks.append(f"Host {host.name}\n  Port {host.port}{user}")
    return "The hosts differ in ssh port or user; put this into ~/.ssh/config:\n" + "\n".join(
        blocks
    )


def as_text(command: Sequence[str]) -> str:
    """For a shell, one part per line."""
    return " ".join(shlex.quote(word) if word != ":" else "\\\n  :" for word in command)
