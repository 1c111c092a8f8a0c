"""Machines that share the ranks of one model: who they are, how they reach each other, and a worker's readiness."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import InvalidInput, ServerError, UserError
from pipeline.serving.group import GroupMember, gather, leader_is_ready, sshd_files
from pipeline.serving.server import TritonServer

LEADER = {
    "LWS_LEADER_ADDRESS": "localhost", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "PIPELINE_GROUP_GPUS": "8",
}  # fmt: skip


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    if shutil.which("ssh-keygen") is None:
        pytest.skip("there is no ssh-keygen")
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / "id_ed25519")],
        check=True,
    )
    return folder


def test_a_container_that_is_in_no_group() -> None:
    assert GroupMember.read({}) is None
    assert GroupMember.read({"LWS_GROUP_SIZE": "1", "LWS_LEADER_ADDRESS": "x"}) is None


def test_all_that_is_wrong_with_a_group_is_said() -> None:
    with pytest.raises(InvalidInput) as caught:
        GroupMember.read({"LWS_GROUP_SIZE": "two", "LWS_WORKER_INDEX": "-1"})
    for name in (
        "LWS_GROUP_SIZE = two",
        "LWS_WORKER_INDEX = -1",
        "LWS_LEADER_ADDRESS",
        "PIPELINE_GROUP_GPUS",
    ):
        assert name in str(caught.value)


def test_the_leader_waits_for_its_workers_and_tells_mpirun_of_them(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = GroupMember.read({**LEADER, "PIPELINE_SSH_FOLDER": str(keys)})
    assert member is not None
    # The name of a worker is that of its leader with its number.
    assert member.hosts == ("localhost", "localhost-1")
    monkeypatch.setattr(GroupMember, "hosts", property(lambda _: ("localhost", "127.0.0.1")))
    with socket.create_server(("127.0.0.1", 0)) as worker:
        port = worker.getsockname()[1]
        group = gather(member, 20, port=port, folder=tmp_path / "group")
    assert (group.hosts, group.slots) == (("localhost", "127.0.0.1"), 8)
    assert Path(group.hostfile).read_text() == "localhost slots=8\n127.0.0.1 slots=8\n"
    # ssh reads it: what it would do for a worker.
    shown = subprocess.run(
        ["ssh", "-G", "-F", group.ssh_config, "llama-0-1.llama"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {f"port {port}", "batchmode yes", "stricthostkeychecking true"} <= set(shown)
    known = Path(group.ssh_config).with_name("known_hosts").read_text()
    public = (keys / "id_ed25519.pub").read_text().split()[1]
    assert known == f"[*]:{port} ssh-ed25519 {public}\n"


def test_a_worker_that_does_not_come_is_named(keys: Path, tmp_path: Path) -> None:
    member = GroupMember.read(
        {**LEADER, "PIPELINE_SSH_FOLDER": str(keys), "LWS_LEADER_ADDRESS": "no.such.name.invalid"}
    )
    assert member is not None
    with pytest.raises(ServerError, match=r"no-1\.such\.name\.invalid"):
        gather(member, 0, folder=tmp_path / "group")


def test_a_worker_takes_one_key_and_gives_ranks_the_environment_of_the_container(
    keys: Path, tmp_path: Path
) -> None:
    member = GroupMember.read({**LEADER, "LWS_WORKER_INDEX": "1", "PIPELINE_SSH_FOLDER": str(keys)})
    assert member is not None
    environment = {
        "LD_LIBRARY_PATH": "/opt/a b:$HOME",
        "QUOTED": 'it\'s "x"\n',
        "SSH_CLIENT": "not this",
        "BASH_FUNC_x%%": "nor this",
    }
    config = sshd_files(member, environment, folder=tmp_path / "sshd").read_text()
    settings = dict(line.split(" ", 1) for line in config.splitlines())
    assert settings["AuthenticationMethods"] == "publickey"
    assert settings["DisableForwarding"] == "yes"
    assert Path(settings["AuthorizedKeysFile"]).read_text().startswith("restrict ssh-ed25519 ")
    session = Path(settings["ForceCommand"])
    assert session.stat().st_mode & 0o077 == 0
    # What sshd runs for `ssh HOST COMMAND`.
    done = subprocess.run(
        [str(session)], capture_output=True, text=True, check=True,
        env={"SSH_ORIGINAL_COMMAND": 'printf "%s|%s" "$LD_LIBRARY_PATH" "$QUOTED"', "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.stdout == '/opt/a b:$HOME|it\'s "x"\n'


def test_without_the_key_it_is_said_how_to_make_one(tmp_path: Path) -> None:
    member = GroupMember.read({**LEADER, "PIPELINE_SSH_FOLDER": str(tmp_path)})
    assert member is not None
    with pytest.raises(UserError, match="ssh-keygen -t ed25519"):
        sshd_files(member, {}, folder=tmp_path / "sshd")


def test_a_worker_is_as_ready_as_its_leader(server: TritonServer) -> None:
    leader = server.ports.grpc
    assert leader is not None
    environment = {**LEADER, "LWS_LEADER_ADDRESS": "127.0.0.1", "LWS_WORKER_INDEX": "1"}
    member = GroupMember.read(environment)
    assert member is not None
    assert leader_is_ready(member, leader)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        unused = taken.getsockname()[1]
    assert not leader_is_ready(member, unused)
    probe = [sys.executable, "-m", "pipeline.serving.group", "ready"]
    given = {**os.environ, **environment, "PIPELINE_GRPC_PORT": str(leader)}
    assert subprocess.run(probe, env=given, capture_output=True, check=False).returncode == 0
