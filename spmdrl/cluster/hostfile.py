"""Machines without a batch system: lists of hosts, and the mpirun command for them.

Reads `host slots=N` files and the CSV of older systems with the header
`job,ip,tf_port,cuda_visible_devices,ssh_port,ssh_username,ssh_password`.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from spmdrl.config import ConfigError, suggest
from spmdrl.runtime.files import read_plain

__all__ = [
    "Host", "as_text", "mpirun_over_hosts", "read_cluster", "read_hostfile", "ssh_advice",
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


def read_hostfile(path: str) -> list[Host]:
    """One line per host: `name`, `name slots=4` or `name:4`; # begins a comment."""
    hosts = []
    for where, line in _lines(path):
        text = line.split("#")[0].split()
        if text:
            hosts.append(_parse_host(where, text))
    return _merge(path, hosts)


def _parse_host(where: str, words: Sequence[str]) -> Host:
    name, _, slots = words[0].partition(":")
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key == "slots":
            slots = value
        elif key not in ("max_slots", "max-slots"):
            raise ConfigError(f"{where}: {word!r} is not understood; write `host slots=N`")
    return Host(_name(where, name), _number(where, "slots", slots or "1", 1, 4096))


def read_cluster(path: str) -> list[Host]:
    """Hosts of the old CSV: one row per process; a slot for each of its GPUs, or one."""
    # Each line by itself: a quoted line break would join the names of two hosts.
    rows = (cells for _, line in _lines(path) for cells in csv.reader([line]))
    header = [cell.strip() for cell in next(rows, [])]
    _check_header(path, header)
    hosts = []
    for number, row in enumerate(rows, start=2):
        if any(cell.strip() for cell in row):
            hosts.append(_parse_row(f"{path}, line {number}", header, row))
    return _merge(path, hosts)


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
    merged: dict[str, Host] = {}
    for host in hosts:
        before = merged.setdefault(host.name, replace(host, slots=0, gpus=()))
        if (before.port, before.user) != (host.port, host.user):
            raise ConfigError(f"{path}: {host.name} has two different ssh ports or users")
        gpus = before.gpus + host.gpus
        merged[host.name] = replace(before, slots=before.slots + host.slots, gpus=gpus)
    for host in merged.values():
        if host.gpus and len(host.gpus) != host.slots:
            raise ConfigError(f"{path}: {host.name} has rows with GPUs and rows without")
    if not merged:
        raise ConfigError(f"{path} names no hosts")
    return list(merged.values())


# ---------------------------------------------------------------------------------------------
# The command


def mpirun_over_hosts(hosts: Sequence[Host], program: Sequence[str]) -> list[str]:
    """mpirun over the hosts; a part for each run of hosts that show the same GPUs."""
    if ":" in program:
        raise ConfigError("a word that is only ':' would begin a new part of the mpirun command")
    command = ["mpirun", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), *_ssh_args(hosts)]
    for name, value in KEEPALIVE.items() if len(hosts) > 1 else []:
        command += ["--prtemca", f"oob_tcp_keepalive_{name}", str(value)]
    command += [
        "--bind-to",
        "core" if _same(h.gpus for h in hosts) and not hosts[0].gpus else "none",
    ]
    for number, (gpus, part) in enumerate(groupby(hosts, key=lambda host: host.gpus)):
        command += [":"] if number else []
        command += _part(list(part), gpus, program)
    return command


def _part(hosts: Sequence[Host], gpus: Sequence[str], program: Sequence[str]) -> list[str]:
    words = ["-np", str(sum(host.slots for host in hosts))]
    words += ["--host", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    words += ["-x", f"CUDA_VISIBLE_DEVICES={','.join(gpus)}"] if gpus else []
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
