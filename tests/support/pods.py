"""Pods of a manifest as processes of this machine: what a kubelet does, without containers.

A container's image is the stage of our Dockerfile: its entrypoint and its environment. Arguments, environment, probes
and mounts are those of the manifest; in all of them, a path below a mount is the path of the folder that stands for
the volume. Each pod has an address of loopback of its own, in place of a network namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from tests.support.waiting import wait_for


@dataclass(frozen=True)
class Instruction:
    """One line, continuations joined: RUN, "python3 …"."""

    name: str
    rest: str

    @property
    def flags(self) -> list[str]:
        """--from=…, --mount=… and the like, before the arguments."""
        return re.match(r"((?:--\S+\s+)*)", self.rest + " ")[1].split()  # type: ignore[index]

    @property
    def arguments(self) -> list[str]:
        """Words that are no flags."""
        return self.rest.split()[len(self.flags) :]


@dataclass
class Stage:
    """From one FROM to the next."""

    name: str
    image: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, name: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions if instruction.name == name]


@dataclass
class Dockerfile:
    """All of it."""

    arguments: dict[str, str]  # ARGs before the first stage
    stages: list[Stage]

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


def parse(text: str) -> Dockerfile:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    found = Dockerfile({}, [])
    for line in joined:
        name, _, rest = line.strip().partition(" ")
        instruction = Instruction(name, rest.strip())
        assert name == name.upper(), line
        if name == "FROM":
            image, _, stage = instruction.rest.partition(" AS ")
            found.stages.append(Stage(stage, image))
        elif not found.stages:
            assert name == "ARG", f"{name} before FROM"
            key, _, value = rest.partition("=")
            found.arguments[key] = value
        else:
            found.stages[-1].instructions.append(instruction)
    return found


ROOT = Path(__file__).resolve().parents[2]
Object = dict[str, Any]
STAGES = {"triton": "serve", "gateway": "gateway"}
_DOCKERFILE = parse((ROOT / "Dockerfile").read_text(encoding="utf-8"))
# Who looks up names of the cluster finds them in this file (`tests.support.names`).
_WITH_NAMES = (
    "import sys; from pathlib import Path; from tests.support.names import HostsFile, use_names; "
    "use_names(HostsFile(Path(sys.argv.pop(1)))); from pipeline.cli.main import main; sys.exit(main())"
)


def secret_values(container: Object, secrets: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Variables that a container has from Secrets. Without one that it needs, it does not start."""
    found = {}
    for variable in container.get("env", ()):
        reference = variable.get("valueFrom", {}).get("secretKeyRef")
        if reference is None:
            continue
        value = secrets.get(reference["name"], {}).get(reference["key"])
        assert value is not None or reference.get("optional"), f"CreateContainerConfigError: {reference}"
        found |= {} if value is None else {variable["name"]: value}
    return found


class Pod:
    """One pod: `init` runs its init containers, `start` its container. A context manager that leaves nothing behind."""

    def __init__(
        self,
        spec: Object,
        folder: Path,
        address: str,
        *,
        configs: Mapping[str, Mapping[str, str]],
        names: Path,
        secrets: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """
        Args:
            spec: Of the pod.
            folder: Where its volumes and logs lie.
            address: Of loopback.
            configs: Name of a ConfigMap -> its files.
            names: File in which its processes find the names of the cluster.
            secrets: Name of a Secret -> its keys.
        """
        self._secrets = secrets or {}
        self.spec, self.address, self._folder, self._names = spec, address, folder, names
        (self.container,) = spec["containers"]
        self._volumes: dict[str, Path] = {}
        for volume in spec["volumes"]:
            place = folder / volume["name"]
            place.mkdir(parents=True)
            self._volumes[volume["name"]] = place
            for file, text in configs.get(volume.get("configMap", {}).get("name", ""), {}).items():
                (place / file).write_text(text, encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    def init(self) -> None:
        """Run the init containers, one after the other."""
        for container in self.spec.get("initContainers", ()):
            command = [*self._entrypoint(container), *self._words(container, container["args"])]
            done = subprocess.run(
                command, env=self._environment(container), cwd=self._folder, capture_output=True, text=True,
                timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr

    def start(self) -> None:
        """Start the container; it is ready when `ready` says so."""
        command = [
            *self._entrypoint(self.container),
            *self._words(self.container, self.container.get("args", [])),
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self._environment(self.container), cwd=self._folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def ready(self) -> bool:
        """What the readiness probe finds."""
        return self.probe("readinessProbe")

    def probe(self, name: str) -> bool:
        """What a probe of the manifest finds now."""
        probe = self.container[name]
        if "exec" in probe:
            words = self._words(self.container, probe["exec"]["command"])
            environment = self._environment(self.container)
            done = subprocess.run(words, env=environment, capture_output=True, timeout=60, check=False)
            return done.returncode == 0
        import urllib.error
        import urllib.request

        (port,) = (
            port["containerPort"]
            for port in self.container["ports"]
            if port["name"] == probe["httpGet"]["port"]
        )
        try:
            url = f"http://{self.address}:{port}{probe['httpGet']['path']}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.ready() or self.ended, "readiness", 120)
        assert not self.ended, self.log

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    @property
    def log(self) -> str:
        """What its container printed."""
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """End all its processes at once, as the loss of a node does."""
        assert self._process is not None
        lost = [
            psutil.Process(self._process.pid),
            *psutil.Process(self._process.pid).children(recursive=True),
        ]
        for pod in lost:
            with contextlib.suppress(psutil.NoSuchProcess):
                pod.kill()
        self._process.wait(30)

    def terminate(self) -> int:
        """SIGTERM, as after the preStop hook; the exit code, within the time that the pod is given."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(self.spec["terminationGracePeriodSeconds"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended:
            self.kill()

    def _entrypoint(self, container: Object) -> list[str]:
        stage = _DOCKERFILE.stage(self._stage)
        words: list[str] = json.loads(stage.all("ENTRYPOINT")[0].rest)
        words = [word for word in words if not word.endswith("nvidia_entrypoint.sh")]
        return self._programs(words) if container is not None else words

    @property
    def _stage(self) -> str:
        return STAGES[self.container["name"]]

    def _programs(self, words: list[str]) -> list[str]:
        """Programs of the image, as they are here."""
        if words and words[0] == "/opt/pipeline/bin/python":
            return [sys.executable, *words[1:]]
        if words and words[0] in ("/opt/pipeline/bin/pipeline", "pipeline"):
            return [sys.executable, "-c", _WITH_NAMES, str(self._names), *words[1:]]
        return words

    def _words(self, container: Object, words: list[str]) -> list[str]:
        here = self._programs([self._path(container, word) for word in words])
        if "--host" in here:
            here[here.index("--host") + 1] = self.address
        return here

    def _environment(self, container: Object) -> dict[str, str]:
        image = {}
        for instruction in _DOCKERFILE.stage(self._stage).all("ENV"):
            image.update(word.split("=", 1) for word in shlex.split(instruction.rest))
        given = {
            variable["name"]: variable["value"]
            for variable in container.get("env", ())
            if "value" in variable
        }
        given |= secret_values(container, self._secrets)
        made = {name: self._path(container, value) for name, value in {**image, **given}.items()}
        outside = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")}
        own = {
            "TMPDIR": self._path(container, "/tmp"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PIPELINE_ADDRESS": self.address,
        }
        return {**outside, **made, **own}

    def _path(self, container: Object, word: str) -> str:
        """A path of the container, as it is here."""
        for mount in sorted(container["volumeMounts"], key=lambda mount: -len(mount["mountPath"])):
            inside = mount["mountPath"]
            if word == inside or word.startswith(f"{inside}/"):
                place = self._volumes[mount["name"]] / mount.get("subPath", "")
                return str(place) + word.removeprefix(inside)
        return word
