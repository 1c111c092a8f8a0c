"""Several machines that serve one model together: pods of a LeaderWorkerSet, one of which runs mpirun over all.

    python -m pipeline.serving.group            what a worker runs: sshd, by which mpirun starts this machine's ranks
    python -m pipeline.serving.group ready      exit 0 while the leader's server is ready, else 1: a worker's probe

The leader runs the entrypoint, which finds the others by what LeaderWorkerSet tells every container
(`leaderworkerset.sigs.k8s.io`, v1: LWS_LEADER_ADDRESS, LWS_GROUP_SIZE, LWS_WORKER_INDEX) and waits until each can be
reached. sshd runs as the container's own user on a port above 1024, without any capability, and takes one key: the
folder PIPELINE_SSH_FOLDER has it, a Secret with id_ed25519 and id_ed25519.pub, which is the host's key, too. Ranks get
the environment of their container, which sshd by itself would not give them.

The scheme (sshd as a user, OMPI_MCA_orte_default_hostfile, OMPI_MCA_plm_rsh_args) is that of Kubeflow's MPI operator.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from pipeline.errors import Fault, InvalidInput, PipelineError, ServerError, UserError
from pipeline.serving.launch import HostGroup
from pipeline.serving.ports import GRPC
from pipeline.serving.probe import is_ready

LEADER, SIZE, INDEX = "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"
GPUS_VARIABLE, KEYS_VARIABLE = "PIPELINE_GROUP_GPUS", "PIPELINE_SSH_FOLDER"
DEFAULT_KEYS = "/etc/pipeline/ssh"
SSH_PORT = 2222
_FOLDER = Path("/tmp/pipeline/group")
_DATA = files("pipeline.serving") / "data"
_KEY = "id_ed25519"
_POLL_S = 1.0
# Variables of a session, and not of the container.
_OWN = ("SSH_ORIGINAL_COMMAND", "SSH_CONNECTION", "SSH_CLIENT", "_", "PWD", "SHLVL")


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One machine of a group.

    Attributes:
        leader: Name of the machine that runs mpirun; its index is 0.
        size: Number of machines.
        gpus: GPUs of each machine.
        keys: Folder with the key by which they reach each other.
    """

    leader: str
    size: int
    index: int
    gpus: int
    keys: Path

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> GroupMember | None:
        """Read the environment of a container; None where it is a group of its own.

        Raises:
            InvalidInput: Values that are missing or no numbers; all of them.
        """
        if environment.get(SIZE, "") in ("", "1"):
            return None
        faults: list[Fault] = []

        def number(name: str, least: int) -> int:
            text = environment.get(name, "")
            if not text.isdecimal() or int(text) < least:
                faults.append(Fault(f"is not a number of at least {least}", key=name, value=text))
                return least
            return int(text)

        leader = environment.get(LEADER, "")
        if not leader:
            faults.append(Fault("is not set", key=LEADER, fix="LeaderWorkerSet sets it"))
        member = cls(
            leader=leader,
            size=number(SIZE, 2),
            index=number(INDEX, 0),
            gpus=number(GPUS_VARIABLE, 1),
            keys=Path(environment.get(KEYS_VARIABLE) or DEFAULT_KEYS),
        )
        if faults:
            raise InvalidInput("environment of a group", faults)
        return member

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of all machines, the leader's first.

        >>> GroupMember("llama-0.llama.prod", 3, 0, 8, Path("/keys")).hosts
        ('llama-0.llama.prod', 'llama-0-1.llama.prod', 'llama-0-2.llama.prod')
        """
        name, dot, domain = self.leader.partition(".")
        return (self.leader, *(f"{name}-{index}{dot}{domain}" for index in range(1, self.size)))


def gather(
    member: GroupMember,
    deadline_s: float,
    stopped: Callable[[], bool] = lambda: False,
    *,
    port: int = SSH_PORT,
    folder: Path = _FOLDER,
) -> HostGroup:
    """Wait until every worker of a leader can be reached, and write what mpirun needs to reach them into `folder`.

    It gives up at the deadline, or as soon as `stopped` is true.

    Raises:
        ServerError: Some cannot be reached in time; all of them are named.
        UserError: The key is missing.
    """
    end = time.monotonic() + deadline_s
    away = list(member.hosts[1:])
    while away := [host for host in away if not _listens(host, port)]:
        if time.monotonic() > end or stopped():
            raise ServerError(f"cannot be reached on port {port} after {deadline_s:.0f} s: {', '.join(away)}")
        time.sleep(_POLL_S)
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "known_hosts"
    known.write_text(f"[*]:{port} {_public_key(member.keys)}\n", encoding="utf-8")
    config = folder / "ssh_config"
    text = (_DATA / "ssh_config").read_text(encoding="utf-8")
    config.write_text(text.format(port=port, key=member.keys / _KEY, known=known), encoding="utf-8")
    hostfile = folder / "hosts"
    hostfile.write_text("".join(f"{host} slots={member.gpus}\n" for host in member.hosts), encoding="utf-8")
    return HostGroup(member.hosts, member.gpus, str(hostfile), str(config))


def sshd_files(
    member: GroupMember, environment: Mapping[str, str], *, port: int = SSH_PORT, folder: Path = _FOLDER
) -> Path:
    """Write the configuration of a worker's sshd into `folder`, and return that file.

    Ranks that are started here get the `environment`.

    Raises:
        UserError: The key is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    session = folder / "session"
    exports = [
        f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())
        if name not in _OWN and name.isidentifier()
    ]  # fmt: skip
    lines = ["#!/bin/sh", *exports, 'exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"', ""]
    session.write_text("\n".join(lines), encoding="utf-8")
    # It holds the container's environment, and with it whatever secrets are there.
    session.chmod(0o700)
    authorized = folder / "authorized_keys"
    authorized.write_text(f"restrict {_public_key(member.keys)}\n", encoding="utf-8")
    config = folder / "sshd_config"
    user = pwd.getpwuid(os.getuid()).pw_name
    values = {
        "port": port,
        "key": member.keys / _KEY,
        "authorized": authorized,
        "user": user,
        "session": session,
    }
    config.write_text((_DATA / "sshd_config").read_text(encoding="utf-8").format(**values), encoding="utf-8")
    return config


def leader_is_ready(member: GroupMember, port: int) -> bool:
    """Tell whether the server of a worker's group is ready; `port` is that of the leader's gRPC."""
    return is_ready(f"{member.leader}:{port}", timeout_s=4)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def _public_key(keys: Path) -> str:
    file = keys / f"{_KEY}.pub"
    if not file.is_file() or not (keys / _KEY).is_file():
        raise UserError(
            f"{keys} has no {_KEY} and {_KEY}.pub: ssh-keygen -t ed25519 -N '' -f {_KEY} makes them, for a Secret that "
            "is mounted there"
        )
    return " ".join(file.read_text(encoding="utf-8").split()[:2])


def main(arguments: Sequence[str]) -> int:
    """Run a worker's sshd, or look whether its leader is ready. Returns the exit code."""
    try:
        member = GroupMember.read(os.environ)
        if member is None or member.index == 0:
            raise UserError(f"this is not a worker of a group: {SIZE} and {INDEX} say so")
        if list(arguments) == ["ready"]:
            ready = leader_is_ready(member, int(os.environ.get("PIPELINE_GRPC_PORT") or GRPC))
            print("the leader is ready" if ready else "the leader is not ready")
            return 0 if ready else 1
        program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if program is None:
            raise UserError("there is no sshd: use the image of the Dockerfile's stage `group`")
        config = sshd_files(member, os.environ)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    # By its whole path, as sshd wants it to start itself again for each session.
    return os.execv(program, [program, "-D", "-e", "-f", str(config)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
