"""Pods of the manifests, run here: init containers, servers, gateways and Redis, while one of them is lost.

No container and no cluster: each container is a process with the arguments, the environment and the mounts of its
manifest (`tests.support.pods`), and a thread does what Kubernetes' controller of endpoints does.
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import openai
import pytest
import yaml

from pipeline.recipe import load_recipe
from pipeline.store.object_store import content_digest
from pipeline.triton.deployment import Deployment
from tests.e2e.conftest import Build, pipeline
from tests.support.kubernetes import (
    cluster_files,
    pod_specs,
    recipe_text,
)
from tests.support.names import HostsFile
from tests.support.pods import Pod, secret_values
from tests.support.servers import PostgresServer, RedisServer
from tests.support.waiting import wait_for

QUESTION = {"role": "user", "content": "Where is my parcel?"}


SECRETS = {"tiny-cpu-redis": {"password": "0123456789abcdef" * 4}}
REDIS_ADDRESS = "127.77.1.1"


class RedisPod(RedisServer):
    """The container of the manifests, with their command and environment, on an address of its own."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__("valkey")
        (self.container,) = spec["containers"]
        self.port = self.container["ports"][0]["containerPort"]

    def command(self) -> Sequence[str]:
        *shell, text = self.container["command"]
        assert "--dir /data" in text
        return (*shell, text.replace("--dir /data", f"--dir {self.folder} --bind {REDIS_ADDRESS}"))

    def environment(self) -> Mapping[str, str]:
        given = super().environment()
        programs = str(Path(self._find("valkey-server")).parent)
        return {**given, "PATH": f"{programs}:{given['PATH']}", **secret_values(self.container, SECRETS)}

    def is_ready(self) -> bool:
        try:
            socket.create_connection((REDIS_ADDRESS, self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def asked(self, *words: str) -> str:
        """What it answers to somebody who has no password."""
        with socket.create_connection((REDIS_ADDRESS, self.port), timeout=5) as connection:
            connection.sendall(" ".join(words).encode() + b"\r\n")
            return connection.recv(1000).decode()


class Endpoints(threading.Thread):
    """Gives the name of a headless Service the addresses of its pods that are ready."""

    def __init__(self, names: HostsFile, service: str) -> None:
        super().__init__(daemon=True)
        self.pods: list[Pod] = []
        # Deleted: they are taken from the Service before they are told to end.
        self.leaving: list[Pod] = []
        self.ready: tuple[str, ...] = ()
        self._names, self._service, self._end = names, service, threading.Event()
        names.write(service)

    def run(self) -> None:
        while not self._end.wait(0.2):
            found = (
                pod for pod in list(self.pods) if pod not in self.leaving and not pod.ended and pod.ready()
            )
            ready = tuple(pod.address for pod in found)
            if ready != self.ready:
                self._names.write(self._service, *ready)
                self.ready = ready

    def close(self) -> None:
        self._end.set()
        self.join(60)


@dataclass
class Cluster:
    """What runs."""

    files: dict[str, str]
    folder: Path
    endpoints: Endpoints
    names: HostsFile
    stack: ExitStack
    count: int = 0
    clients: dict[str, openai.OpenAI] = field(default_factory=dict)

    def pod(self, component: str) -> Pod:
        """Start a pod of a component; it is not ready yet."""
        self.count += 1
        (spec,) = (spec for name, spec in pod_specs(self.files) if name == component)
        configs = {"tiny-cpu-recipe": {"recipe.yaml": self.files["base/recipe.yaml"]}}
        pod = Pod(
            spec, self.folder / f"{component}-{self.count}", f"127.77.0.{self.count}",
            configs=configs, names=self.names.file, secrets=SECRETS,
        )  # fmt: skip
        self.stack.enter_context(pod)
        pod.init()
        pod.start()
        if component == "triton":
            self.endpoints.pods.append(pod)
        return pod

    def client(self, gateway: Pod) -> openai.OpenAI:
        """OpenAI's client of a gateway."""
        made = self.clients.get(gateway.address)
        if made is None:
            made = self.clients[gateway.address] = self.stack.enter_context(
                openai.OpenAI(
                    base_url=f"http://{gateway.address}:8080/v1", api_key="-", max_retries=0, timeout=60,
                    default_headers={"Host": "tiny-cpu-gateway:8080"},
                )
            )  # fmt: skip
        return made


Start = Callable[..., Cluster]


@pytest.fixture
def start(build: Build, store: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a cluster with a recipe that is changed as `--set` does."""
    package = Path(build("tiny-cpu")["artifact"])
    address = f"file://{tmp_path / 'objects'}"
    assert pipeline("store", "push", package.name, address, store=store).returncode == 0
    names = HostsFile(tmp_path / "names")

    def started(*overrides: str) -> Cluster:
        recipe = load_recipe("tiny-cpu", overrides)
        served = {
            "folder": package, "content": content_digest(package), "recipe_text": recipe_text(recipe),
        }  # fmt: skip
        files = cluster_files(
            recipe, Deployment.load(package), packaged=served, triton={"image": "own/serve:1"},
            deploy={"gateway_image": "own/gateway:1"},
            kubernetes={"packages": address, "min_replicas": 2, "max_replicas": 2},
        )  # fmt: skip
        redis = stack.enter_context(RedisPod(dict(pod_specs(files))["redis"]))
        assert "NOAUTH" in redis.asked("KEYS", "*")
        names.write("tiny-cpu-redis", REDIS_ADDRESS)
        endpoints = Endpoints(names, "tiny-cpu-servers")
        endpoints.start()
        stack.callback(endpoints.close)
        # Sockets of pods lie below it, and their paths may have about a hundred characters.
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="pods-")))
        return Cluster(files, folder, endpoints, names, stack)

    with ExitStack() as stack:
        yield started


@dataclass
class Load:
    """Streams that are asked for one after the other, by several threads, until it is told to stop."""

    address: str
    answers: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        turn = 0
        while not self.stop.is_set():
            turn += 1
            # Never from the cache: each asks something else.
            self.ask(f"Where is my parcel {number}-{turn}?")

    def ask(self, text: str, max_tokens: int = 24) -> str:
        """One stream to its end. What came before a server was lost is kept apart from what never began."""
        connection = http.client.HTTPConnection(self.address, 8080, timeout=120)
        body = {"model": "tiny-cpu", "messages": [{"role": "user", "content": text}], "stream": True,
                "max_tokens": max_tokens, "temperature": 0}  # fmt: skip
        headers = {"Content-Type": "application/json", "Host": "tiny-cpu-gateway:8080"}
        pieces: list[str] = []
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                self.failed.append(f"{answer.status} {answer.read()[:200]!r}")
                return ""
            for line in answer:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    (self.broken if pieces else self.failed).append(str(event["error"]))
                    return ""
                pieces += [choice["delta"].get("content") or "" for choice in event["choices"]]
        finally:
            connection.close()
        self.answers.append("".join(pieces))
        return self.answers[-1]

    def wait_for_more(self, answers: int) -> None:
        until = len(self.answers) + answers
        wait_for(lambda: len(self.answers) >= until, f"{answers} more answers", 300)


def requests_of(pod: Pod) -> float:
    """Requests that Triton's entry model of a pod has answered, warm-up and probes included."""
    connection = http.client.HTTPConnection(pod.address, 8002, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    lines = (line for line in text.splitlines() if line.startswith("nv_inference_request_success{"))
    return sum(float(line.split()[-1]) for line in lines if 'model="tensorrt_llm_bls"' in line)


def starting(cluster: Cluster) -> Pod:
    """A server that has just begun: not ready, and not killed for it."""
    pod = cluster.pod("triton")
    assert not pod.ready()
    assert pod.probe("livenessProbe")
    return pod


@pytest.mark.servers
@pytest.mark.timeout(900)
def test_a_server_is_lost_and_replaced_and_another_one_leaves(start: Start) -> None:
    cluster = start("cache.enabled=true")
    first, second = (starting(cluster) for _ in range(2))
    for pod in (first, second):
        pod.wait_until_ready()
        assert pod.probe("startupProbe")
    gateway = cluster.pod("gateway")
    gateway.wait_until_ready()
    package = yaml.safe_load(cluster.files["base/server.yaml"].partition("---")[0])
    named = package["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/version"]
    # A gateway fetches no weights.
    sizes = [
        sum(file.stat().st_size for file in (pod_folder / "package" / named).rglob("*") if file.is_file())
        for pod_folder in (cluster.folder / "triton-1", cluster.folder / "gateway-3")
    ]
    assert sizes[1] < sizes[0]

    load = Load(gateway.address)
    threads = [threading.Thread(target=load.run, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    load.wait_for_more(8)
    assert load.failed == []

    # A node is lost: whatever had begun there ends with an error that says so, and nothing else fails.
    first.kill()
    wait_for(lambda: first.address not in cluster.endpoints.ready, "its address to go", 60)
    load.wait_for_more(8)
    third = cluster.pod("triton")
    wait_for(lambda: third.address in cluster.endpoints.ready or third.ended, "the replacement", 300)
    assert not third.ended, third.log
    before = requests_of(third)
    wait_for(lambda: requests_of(third) > before + 8, "requests to the replacement", 300)
    assert load.failed == []
    assert len(load.broken) <= len(threads)

    # Another one is deleted: taken from the Service, left alone until gateways know, then told to end.
    lost = len(load.broken)
    cluster.endpoints.leaving.append(second)
    wait_for(lambda: second.address not in cluster.endpoints.ready, "its address to go", 60)
    load.wait_for_more(8)
    assert second.terminate() == 0
    load.wait_for_more(8)
    load.stop.set()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert load.failed == []
    assert len(load.broken) == lost

    # One cache for all gateways: another one answers from what the first one kept.
    # To its end: what is cut off is not kept.
    text = load.ask(QUESTION["content"], 200)
    other = cluster.pod("gateway")
    other.wait_until_ready()
    assert Load(other.address).ask(QUESTION["content"], 200) == text
    page = http.client.HTTPConnection(other.address, 8080, timeout=30)
    page.request("GET", "/metrics")
    metrics = page.getresponse().read().decode()
    page.close()
    hits = [line for line in metrics.splitlines()
            if line.startswith("pipeline_cache_events_total{") and 'event="hit_' in line]  # fmt: skip
    assert sum(float(line.split()[-1]) for line in hits) == 1
    # One memory of conversations, and no place for files that both could have.
    said = cluster.client(gateway).responses.create(
        model="tiny-cpu", input="Where is my parcel?", max_output_tokens=8
    )
    then = cluster.client(other).responses.create(
        model="tiny-cpu", input="And now?", max_output_tokens=8, previous_response_id=said.id
    )
    assert then.usage.input_tokens > said.usage.total_tokens  # type: ignore[union-attr]
    for pod in (gateway, other):
        with pytest.raises(openai.APIStatusError, match=r"cache\.backend of kind pgvector") as refused:
            cluster.client(pod).files.create(file=("in.jsonl", b"{}"), purpose="batch")
        assert refused.value.status_code == 501
    # uvicorn ends by the signal that it was told to end by.
    assert gateway.terminate() in (0, -signal.SIGTERM)
    assert third.terminate() == 0


@pytest.mark.servers
def test_a_batch_outlives_the_gateways_that_run_it(start: Start) -> None:
    """Of two gateways, one is lost and one is rolled; what was uploaded and answered is at those that follow."""
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": {
            "model": "tiny-cpu", "max_tokens": 24, "messages": [{"role": "user", "content": f"Parcel {number}?"}]
        }}
        for number in range(400)
    ]  # fmt: skip
    with PostgresServer() as database:
        cluster = start(f"cache.backend={{kind: pgvector, url: '{database.url}'}}")
        cluster.pod("triton").wait_until_ready()
        gateways = [cluster.pod("gateway") for _ in range(2)]
        for gateway in gateways:
            gateway.wait_until_ready()
        first, second = map(cluster.client, gateways)
        text = "\n".join(map(json.dumps, lines))
        file = first.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        assert second.files.content(file.id).text == text
        batch = second.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        def completed(asked: openai.OpenAI) -> int:
            counts = asked.batches.retrieve(batch.id).request_counts
            assert counts is not None
            return counts.completed

        wait_for(lambda: completed(first) > 10, "answers", 60)
        running = next(gateway for gateway in gateways if f"{batch.id}-" in gateway.log)
        left = next(gateway for gateway in gateways if gateway is not running)
        running.kill()
        kept = completed(cluster.client(left))
        wait_for(lambda: completed(cluster.client(left)) > kept + 10, "answers by the one that is left", 120)
        assert f"{batch.id}-" in left.log
        third = cluster.pod("gateway")
        third.wait_until_ready()
        assert left.terminate() in (0, -signal.SIGTERM)
        wait_for(
            lambda: cluster.client(third).batches.retrieve(batch.id).status == "completed", "the end", 300
        )
        done = cluster.client(third).batches.retrieve(batch.id)
        assert (done.error_file_id, completed(cluster.client(third))) == (None, len(lines))
        assert done.output_file_id is not None
        output = cluster.client(third).files.content(done.output_file_id).text.splitlines()
        assert [json.loads(line)["custom_id"] for line in output] == [line["custom_id"] for line in lines]
        # What was answered was not asked again, but for what was under way when a gateway ended.
        asked = [pod.log.count(f"request_id={batch.id}-") for pod in (running, left, third)]
        assert len(lines) <= sum(asked) <= len(lines) + 2 * 64, asked
