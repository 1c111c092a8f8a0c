"""A deployment for systemd: `pipeline serve` of this installation as a service of the machine, whatever it is made of.

No container is described here: `serve` starts Triton by itself, in a container or as processes, and the gateway beside
it. systemd.service(5) and systemd.exec(5) of systemd 247 and newer.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from pipeline import __version__
from pipeline.serving.launch import ServeOptions
from pipeline.serving.manifests.description import ManifestOptions
from pipeline.triton.deployment import Deployment

_USER_HOME = "/var/lib/pipeline"
_STOP_GRACE_S = 60
# systemd.exec(5). Not among them: MemoryDenyWriteExecute (OpenVINO compiles kernels), ProcSubset (/proc/meminfo and
# others say what the machine has), RemoveIPC (it takes shared memory from every unit of the same user), and limits of
# networks, because clients, caches and receivers of spans may be anywhere.
_HARDENED = (
    "UMask=0077",
    "NoNewPrivileges=yes",
    "CapabilityBoundingSet=",
    "PrivateTmp=yes",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "ProtectClock=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "ProtectProc=invisible",
    "LockPersonality=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallFilter=~@privileged",
    "SystemCallErrorNumber=EPERM",
)
_WITHOUT_GPUS = ("PrivateDevices=yes", "PrivateUsers=yes")
# nvidia-smi asks them what the machine has; the container gets them from Docker. Its socket belongs to a group, which a
# user namespace of the unit's own would hide.
_WITH_GPUS = ("DevicePolicy=closed", "DeviceAllow=char-nvidia* rw")


def systemd_unit(deployment: Deployment, package: Path, options: ServeOptions, more: ManifestOptions) -> str:
    """Write a unit file.

    Args:
        deployment: What the package's deployment.json says, or will say.
        package: Folder of the package.
        options: Ports, address, image and GPUs.
        more: Whose process it is, by which words it is started, and its limits.
    """
    name, in_container = deployment.name, deployment.requirements is not None
    ports, launch = options.ports, options.launch
    recipe = (
        options.recipe[: options.recipe.index("--store")] if "--store" in options.recipe else options.recipe
    )
    command = (
        *more.program,
        "serve",
        *recipe,
        *("--package", str(package.absolute()), "--store", _USER_HOME, "--offline"),
        *(
            "--address",
            options.launch.address,
            "--host",
            options.launch.address,
            "--port",
            str(more.gateway_port),
        ),
        *(() if ports.http is None else ("--http-port", str(ports.http))),
        *(() if ports.grpc is None else ("--grpc-port", str(ports.grpc))),
        *("--metrics-port", str(ports.metrics)),
        *(() if launch.start_timeout_s is None else ("--start-timeout-s", f"{launch.start_timeout_s:g}")),
        *(() if launch.image is None else ("--image", launch.image)),
        *(("--gpus", ",".join(map(str, launch.gpus))) if launch.gpus else ()),
        *(word for rule in sorted(options.allowed) for word in ("--allow", rule)),
    )
    after = "network-online.target docker.service" if in_container else "network-online.target"
    memory = [] if more.memory is None else [f"MemoryMax={more.memory}"]
    unit = f"pipeline-{name}.service"
    lines = [
        f"# {name} behind Triton, with OpenAI's API in front of it, by pipeline {__version__}.",
        "#",
        f"#   sudo useradd --system --home-dir {_USER_HOME} --shell /usr/sbin/nologin {more.user}",
        *([f"#   sudo usermod --append --groups docker {more.user}"] if in_container else []),
        f"#   sudo install --mode 644 {unit} /etc/systemd/system/",
        f"#   sudo systemctl daemon-reload && sudo systemctl enable --now {unit}",
        f"#   journalctl --unit {unit} --follow",
        f"#   sudo -u {more.user} {shlex.join(more.program)} ps --store {_USER_HOME}",
        "#",
        f"# {more.user} must be able to read the package, the recipe and the program that are named below.",
        "[Unit]",
        f"Description=pipeline: {name} behind NVIDIA Triton",
        "Wants=network-online.target",
        f"After={after}",
        "# What dies is started again inside; a service that ends five times in an hour stays down.",
        "StartLimitIntervalSec=1h",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=exec",
        f"User={more.user}",
        f"StateDirectory={Path(_USER_HOME).name}",
        "StateDirectoryMode=0700",
        f"Environment=HOME={_USER_HOME} PYTHONUNBUFFERED=1",
        f"ExecStart={_exec_line(command)}",
        "Restart=on-failure",
        "RestartSec=10s",
        "# 2: what cannot be served does not become better by trying.",
        "RestartPreventExitStatus=2",
        "# The supervisor drains requests and ends what it started; what is left then is killed.",
        "KillMode=mixed",
        f"TimeoutStopSec={_STOP_GRACE_S}s",
        "OOMPolicy=continue",
        "LimitMEMLOCK=infinity",
        "LimitSTACK=64M",
        "LimitNOFILE=65536",
        "# A dump of memory would hold what was asked and answered.",
        "LimitCORE=0",
        *memory,
        *_HARDENED,
        *(_WITH_GPUS if in_container else _WITHOUT_GPUS),
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ]
    return "\n".join(lines)


def _exec_line(words: Sequence[str]) -> str:
    """Words as systemd.service(5) reads them: its own quotes, and % and $ doubled."""
    return " ".join(_exec_word(word) for word in words)


def _exec_word(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./\\$-]+", escaped):
        return escaped
    return '"' + escaped.replace('"', '\\"') + '"'
