"""The command that starts Triton, and what is looked for before it is run."""

from __future__ import annotations

import socket
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pipeline.errors import InvalidInput, ServerError, UserError
from pipeline.recipe import load_recipe
from pipeline.serving import launch_embedded
from pipeline.serving.launch import Launch, Start, mirror, traces_endpoint
from pipeline.serving.launch_docker import docker_launch
from pipeline.serving.launch_embedded import Installation, embedded_launch
from pipeline.serving.launch_gpu import GpuPlace, gpu_launch
from pipeline.serving.ports import Listeners, Ports
from pipeline.triton.deployment import LaunchSpec
from tests.support.deployments import gpu_deployment

PORTS = Ports(None, 2, 3)
LISTENERS = Listeners.within(Path("/tmp/pipeline-0"), PORTS)
FOUND = Installation(Path("/wheel/pytriton/tritonserver"), Path("/wheel/libs"), "3.11")


def launch(repository: Path = Path("/models"), stage: str = "/tmp/stage") -> Launch:
    start = Start(Path(stage), LISTENERS, "prefix-", deadline_s=90)
    return embedded_launch(repository, (), start, installation=FOUND)


def test_the_command() -> None:
    assert launch().command == (
        "/wheel/pytriton/tritonserver/bin/tritonserver",
        "--model-repository=/tmp/stage/repository",
        "--model-control-mode=none",
        "--http-restricted-api=model-repository,shared-memory,trace,logging:disabled:=disabled",
        "--grpc-restricted-protocol=model-repository,shared-memory,trace,logging:disabled:=disabled",
        "--disable-auto-complete-config",
        "--backend-directory=/tmp/stage/backends",
        "--cache-directory=/wheel/pytriton/tritonserver/caches",
        "--backend-config=python,shm-region-prefix-name=prefix-",
        "--backend-config=python,stub-timeout-seconds=90",
        "--allow-http=false",
        "--grpc-address=unix:/tmp/pipeline-0/grpc",
        "--grpc-port=1",
        "--metrics-address=127.0.0.1",
        "--metrics-port=3",
        "--metrics-interval-ms=500",
        "--allow-gpu-metrics=false",
        "--exit-timeout-secs=5",
    )


def test_the_repository_is_mirrored_file_by_file(tmp_path: Path) -> None:
    source = tmp_path / "my models"
    (source / "a" / "1" / "__pycache__").mkdir(parents=True)
    (source / "a" / "1" / "model.py").write_text("x = 1")
    mirrored = tmp_path / "stage" / "repository"
    embedded_launch(source, ("a",), Start(mirrored.parent, LISTENERS, "prefix-")).prepare()
    assert (mirrored / "a" / "1" / "model.py").read_text() == "x = 1"
    assert not (mirrored / "a" / "1").is_symlink()
    assert not list(mirrored.rglob("__pycache__"))


def test_paths_of_the_container_become_those_of_this_machine(tmp_path: Path) -> None:
    source = tmp_path / "repository"
    (source / "a" / "1").mkdir(parents=True)
    (source / "a" / "config.pbtxt").write_text('string_value: "/deployment/model_repository/a/1/engine"')
    (source / "a" / "1" / "model.yaml").write_text("model: checkpoint")
    mirror(source, tmp_path / "mirror", root=("/deployment", Path("/store/package")))
    made = tmp_path / "mirror" / "a"
    assert (made / "config.pbtxt").read_text() == 'string_value: "/store/package/model_repository/a/1/engine"'
    assert (made / "1" / "model.yaml").is_symlink()
    assert "/deployment/" in (source / "a" / "config.pbtxt").read_text()


def test_a_stage_that_a_shell_would_break_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="without spaces in its name: set TMPDIR"):
        launch(tmp_path, stage="/tmp/my stage").prepare()


@pytest.mark.parametrize("kind", ["embedded", "native", "docker"])
def test_a_repository_with_other_models_is_refused(tmp_path: Path, kind: str) -> None:
    """Triton loads whatever lies there, so a folder too many would be served, and one too few not be missed."""
    deployment = gpu_deployment(LaunchSpec(engine_models=("tensorrt_llm",)))
    repository = tmp_path / "model_repository"
    for name in (*deployment.models[1:], "drill", ".ipynb_checkpoints"):
        (repository / name).mkdir(parents=True)
    (repository / "README.md").touch()
    start = Start(tmp_path / "stage", LISTENERS, "prefix-", PORTS)
    made = {
        "embedded": embedded_launch(repository, deployment.models, start),
        "native": gpu_launch(deployment, tmp_path, start),
        "docker": docker_launch(deployment, tmp_path, "image", start, docker="true"),
    }[kind]
    with pytest.raises(InvalidInput) as caught:
        made.prepare()
    assert [fault.key for fault in caught.value.faults] == ["preprocessing", ".ipynb_checkpoints", "drill"]
    (repository / "preprocessing").mkdir()
    (repository / "drill").rmdir()
    (repository / ".ipynb_checkpoints").rmdir()
    made.prepare()


def test_triton_exports_spans_where_the_receiver_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert traces_endpoint() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318/")
    traces = traces_endpoint()
    assert traces == "http://collector:4318/v1/traces"
    assert traces_endpoint("http://here:4318") == "http://here:4318/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://exact/spans")
    assert traces_endpoint() == "http://exact/spans"
    assert traces_endpoint("http://here:4318") == "http://here:4318/v1/traces"
    deployment = gpu_deployment(LaunchSpec(mode="leader", engine_models=("tensorrt_llm",), world_size=2))
    start = Start(tmp_path, LISTENERS, "prefix-", PORTS)
    traced, silent = (
        (
            embedded_launch(tmp_path, deployment.models, start, traces=receiver).command,
            gpu_launch(deployment, tmp_path, start, place=GpuPlace(traces=receiver)).command,
            docker_launch(deployment, tmp_path, "image", start, traces=receiver).command,
        )
        for receiver in (traces, None)
    )
    for command in traced:
        # One rank listens, and traces.
        assert command.count(f"--trace-config=opentelemetry,url={traces}") == 1
        assert command.count("--trace-config=mode=opentelemetry") == 1
    assert not [word for command in silent for word in command if "trace-config" in word]


def test_ports_that_are_taken_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ServerError, match=rf"gRPC port 127\.0\.0\.1:{number} cannot be used"):
            Ports(None, number, Ports.free().metrics).check()
        assert Ports.choose(load_recipe("tiny-cpu", [f"triton.grpc_port={number}"])).grpc == number
    with pytest.raises(ServerError, match="HTTP 5, gRPC 5 and metrics 6 must be different ports"):
        Ports(5, 5, 6).check()


@pytest.mark.parametrize("http", [True, False])
@pytest.mark.parametrize("grpc", [True, False])
def test_only_ports_that_are_open_are_chosen(http: bool, grpc: bool) -> None:
    recipe = load_recipe("tiny-cpu", [f"serving={{http: {http}, grpc: {grpc}}}"])
    for ports in (
        Ports.free(http=http, grpc=grpc),
        Ports.choose(recipe),
        Ports.choose(recipe, usual=False),
        Ports.free(http=http, grpc=grpc).moved(),
    ):
        assert set(ports.open) == {"metrics", *(["HTTP"] if http else []), *(["gRPC"] if grpc else [])}
        assert len(set(ports.open.values())) == len(ports.open)
        assert Listeners.within(Path("/tmp"), ports).http is None or http


def test_the_installation_here_can_run() -> None:
    found = Installation.find()
    assert found.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert found.missing_libraries() == []
    assert found.environment()["PATH"].startswith(str(Path(sys.executable).parent))


def test_a_missing_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_embedded.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        UserError, match=r"Triton is not installed in .*: install it: pip install .*\[server\]'"
    ):
        Installation.find()


def test_numpy_2_is_refused_before_it_crashes_the_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(
        launch_embedded.metadata, "version", lambda name: "2.1.0" if name == "numpy" else real(name)
    )
    with pytest.raises(UserError, match=r"numpy 2\.1\.0 crashes Triton's Python stub: pip install 'numpy<2'"):
        Installation.find()


def test_a_python_without_a_stub_is_refused() -> None:
    found = Installation.find()
    with pytest.raises(UserError, match=r"has no Python stub for 3\.99; it has .*3\.11"):
        Installation(found.root, found.libraries, "3.99").check()


def test_a_missing_libpython_is_found_before_the_server_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ldd = tmp_path / "ldd"
    ldd.write_text(
        "#!/bin/sh\necho '  libpython3.11.so.1.0 => not found'\necho '  libc.so.6 => /lib/libc.so.6'\n"
    )
    ldd.chmod(0o755)
    monkeypatch.setattr(launch_embedded.shutil, "which", lambda _: str(ldd))
    with pytest.raises(
        UserError, match=r"does not find libpython3\.11\.so\.1\.0: apt-get install libpython3"
    ):
        Installation.find()
