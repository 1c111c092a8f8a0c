"""What is rendered for Prometheus and Grafana, held against the metrics that there are, and against promtool."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from pipeline.cli.monitoring import command
from pipeline.deploy.alerts import (
    TimeScale,
    alerts_of,
    promtool_tests,
    recording_rules,
    rules_file,
    target_down,
)
from pipeline.deploy.monitoring import WatchedDeployment, monitoring_files
from pipeline.gateway.metric_names import OWN_VIEWS
from pipeline.recipe import Recipe, load_recipe
from pipeline.resources import parse_yaml
from pipeline.serving.ports import Ports
from pipeline.triton.running import RunningServer
from tests.support.servers import Unavailable, prometheus_program, promtool
from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
RECIPES = (
    ("llama-3.1-8b-fp8", ("cache.enabled=true",)),
    ("tiny-cpu", ()),
    ("tiny-cpu", ("name=targets", "slo={ttft_p95_ms: 150, itl_p95_ms: 12.5, ttft_p99_ms: 160}")),
)
# A name of PromQL that no label, keyword or function is: ours, and Triton's.
_METRIC = re.compile(r"\b(?:model(?:_le)?:)?(?:pipeline|nv)_[a-z0-9_]+(?::\w+)?")


def files(*recipes: Recipe) -> dict[str, str]:
    watched = [WatchedDeployment(recipe, ("gateway:8080",), ("gpu1:8002", "gpu2:8002")) for recipe in recipes]
    return monitoring_files(watched)


def queries(rendered: dict[str, str]) -> Iterator[str]:
    """All PromQL that is rendered."""
    for group in parse_yaml(rendered["alerts.yaml"])["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in json.loads(rendered["dashboard.json"])["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def test_rules_and_panels_read_metrics_that_there_are() -> None:
    recipes = [load_recipe(name, overrides) for name, overrides in RECIPES]
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}
    known = {f"{view.name}{suffix}" for view in OWN_VIEWS for suffix in suffixes[view.kind]}
    known |= {rule["record"] for rule in recording_rules(recipes, TimeScale())}
    known |= set(engine_metrics())
    # Of Triton itself: the servers tier finds these on a real page, those of GPUs excepted.
    known |= {
        "nv_inference_request_duration_us", "nv_inference_queue_duration_us", "nv_inference_request_success",
        "nv_inference_pending_request_count", "nv_inference_request_failure", "nv_cpu_utilization",
        "nv_cpu_memory_used_bytes", "nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_power_usage",
    }  # fmt: skip
    read = {
        name for query in queries(files(*recipes)) for name in _METRIC.findall(re.sub(r'"[^"]*"', "", query))
    }
    assert read - known == set()
    assert len(read) > 30


def engine_metrics() -> Iterator[str]:
    """Names that the model of the `cpu` engine publishes, as TensorRT-LLM's backend does."""
    for file in (ROOT / "model_repo/tensorrt_llm/1").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and str(node.value).startswith("nv_trt_llm_"):
                yield str(node.value)


def test_targets_are_those_of_the_slo() -> None:
    with_targets = load_recipe("tiny-cpu", RECIPES[2][1])
    rules = {alert.name: alert.expr for alert in alerts_of(with_targets)}
    assert re.search(r"p95_5m\S* > 0\.15 ", rules["PipelineTimeToFirstTokenP95High"])
    assert re.search(r"p99_5m\S* > 0\.16 ", rules["PipelineTimeToFirstTokenP99High"])
    # Without one of its own, p99 may be twice p95's.
    assert re.search(r"p99_5m\S* > 0\.025 ", rules["PipelineInterTokenLatencyP99High"])
    without = {alert.name for alert in alerts_of(load_recipe("tiny-cpu"))}
    assert {name for name in rules if re.search(r"P9\dHigh$", name)} == set(rules) - without


def test_every_alert_has_a_section_in_the_runbook() -> None:
    recipe = load_recipe("tiny-cpu", ("slo={ttft_p95_ms: 1, itl_p95_ms: 1}", "cache.enabled=true"))
    names = [alert.name for alert in (*alerts_of(recipe), target_down(TimeScale()))]
    page = (ROOT / "docs/how-to/alerts.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^## (Pipeline\w+)$", page, re.MULTILINE)) == sorted(names)


def test_panels_lie_side_by_side() -> None:
    """On Grafana's grid of 24 columns, under ids of their own, with the variables that the queries use."""
    board = json.loads(files(load_recipe("llama-3.1-8b-fp8", ("cache.enabled=true",)))["dashboard.json"])
    # What Grafana's schema of a dashboard requires, and what the panels need.
    assert {"editable", "graphTooltip", "schemaVersion", "panels", "templating", "time"} <= set(board)
    assert len(board["uid"]) <= 40
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]+)", json.dumps(board["panels"]))) - {"labels"} <= variables


def run(store: Path, *words: str) -> Result:
    return CliRunner().invoke(command, [*words, "--store", str(store)])


def test_the_command_writes_what_prometheus_scrapes(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    done = run(
        tmp_path, "tiny-cpu", "llama-3.1-8b-fp8", "--output", str(folder), "--triton", "tiny-cpu=a:1",
        "--triton", "tiny-cpu=b:2", "--gateway", "c:3",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "tiny-cpu: has no slo.ttft_p95_ms and no slo.itl_p95_ms" in done.output
    config: Any = parse_yaml((folder / "prometheus.yml").read_text())
    gateway, triton = config["scrape_configs"]
    assert gateway["static_configs"] == [{"targets": ["c:3"]}]
    assert triton["static_configs"] == [{"targets": ["a:1", "b:2"], "labels": {"deployment": "tiny-cpu"}}]
    assert triton["file_sd_configs"] == [{"files": [str(tmp_path / "running/targets/llama-3.1-8b-fp8.json")]}]
    assert sorted(path.name for path in folder.iterdir()) == [
        "alerts.yaml", "alerts_test.yaml", "dashboard.json", "prometheus.yml",
    ]  # fmt: skip


def test_wrong_addresses_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for words, said in (
        (("--triton", "other=a:1"), "--triton other=…: is none of the recipes (tiny-cpu)"),
        (("--triton", "a:1"), "a:1: is not NAME=HOST:PORT"),
        (("--gateway", "http://a:1"), "http://a:1: is not HOST:PORT"),
    ):
        done = run(tmp_path, "tiny-cpu", "--output", str(folder), *words)
        assert done.exit_code != 0
        assert said in done.output + str(done.exception)
    assert not folder.exists()


@pytest.fixture(scope="module")
def prometheus() -> Path:
    try:
        return prometheus_program("prometheus")
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.servers
@pytest.mark.usefixtures("prometheus")
@pytest.mark.parametrize("chosen", [RECIPES[:1], RECIPES[1:2], RECIPES], ids=["gpu", "no targets", "several"])
def test_promtool_finds_no_fault_and_every_alert_fires(chosen: Any, tmp_path: Path) -> None:
    """Each alert under its example, and not otherwise: what `promtool test rules` is given is rendered, too."""
    for name, text in files(*(load_recipe(name, overrides) for name, overrides in chosen)).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for words in (("check", "rules", "alerts.yaml"), ("check", "config", "prometheus.yml")):
        assert promtool(*words, folder=tmp_path)[0] == 0
    status, said = promtool("test", "rules", "alerts_test.yaml", folder=tmp_path)
    assert status == 0, said


@pytest.mark.servers
@pytest.mark.usefixtures("prometheus")
def test_prometheus_follows_the_target_of_a_deployment_that_moves(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert run(tmp_path, "tiny-cpu", "--output", str(folder)).exit_code == 0
    record = RunningServer.of(SERVER, tmp_path)
    record.write(tmp_path / "running", "tiny-cpu")
    status, said = promtool("check", "config", "prometheus.yml", folder=folder)
    assert status == 0, said
    with watching(prometheus_program("prometheus"), folder) as targets:
        wait_for(lambda: targets() == {"127.0.0.1:8002"}, "the first target")
        moved = replace(record, metrics_url="http://127.0.0.1:9002/metrics")
        moved.write(tmp_path / "running", "tiny-cpu")
        wait_for(lambda: targets() == {"127.0.0.1:9002"}, "the target after a rollout")


@contextmanager
def watching(program: Path, folder: Path) -> Iterator[Callable[[], set[str]]]:
    """Run Prometheus with the files of a folder; what reads the targets of its job `triton`."""
    address = f"127.0.0.1:{Ports.free().metrics}"
    words = [
        "--config.file",
        "prometheus.yml",
        "--storage.tsdb.path",
        "data",
        "--web.listen-address",
        address,
    ]

    def targets() -> set[str]:
        try:
            with urllib.request.urlopen(f"http://{address}/api/v1/targets", timeout=10) as answer:
                active = json.load(answer)["data"]["activeTargets"]
        except OSError:
            return set()
        return {target["labels"]["instance"] for target in active if target["labels"]["job"] == "triton"}

    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, *words], cwd=folder, stdout=log, stderr=log)
        try:
            yield targets
        finally:
            process.kill()
            process.wait()


SERVER = {
    "grpc_url": "127.0.0.1:8001",
    "http_url": "http://127.0.0.1:8000",
    "metrics_url": "http://127.0.0.1:8002/metrics",
}


@pytest.mark.servers
@pytest.mark.usefixtures("prometheus")
def test_alerts_of_a_namespace_are_for_its_own_series_alone(tmp_path: Path) -> None:
    """Every alert fires under its example, and none where the series are of another namespace with the same recipe."""
    recipe = load_recipe("llama-3.1-8b-fp8", ("cache.enabled=true",))
    rules = rules_file([recipe], TimeScale(), "one")
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules))
    tests = promtool_tests([recipe], "alerts.yaml", "one")
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tests))
    own = {"series": f'pipeline_model_ready{{namespace="one",model="{recipe.name}"}}', "values": "1x120"}
    for case in tests["tests"]:
        for series in case["input_series"]:
            series["series"] = series["series"].replace('namespace="one"', 'namespace="other"')
        case["input_series"].append(own)
        for wanted in case["alert_rule_test"]:
            wanted["exp_alerts"] = []
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(tests))
    for words in (
        ("check", "rules", "alerts.yaml"),
        ("test", "rules", "own.yaml"),
        ("test", "rules", "other.yaml"),
    ):
        status, said = promtool(*words, folder=tmp_path)
        assert status == 0, said


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_drill_fires_every_alert_and_fills_every_panel(prometheus: Path, tmp_path: Path) -> None:
    """Before a real Prometheus; then promtool judges the pages that it scraped."""
    line = [sys.executable, "benchmarks/alerts.py", "--prometheus", str(prometheus), "--keep", str(tmp_path)]
    environment = {**os.environ, "PIPELINE_STORE": str(tmp_path / "store"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "15 of 15 kinds of alerts fired" in done.stdout
    for page in ("gateway", "triton"):
        status, said = promtool(
            "check", "metrics", page=(tmp_path / f"{page}.txt").read_text(encoding="utf-8")
        )
        # Names that Triton and TensorRT-LLM's backend chose are not by the book; ours are.
        assert [line for line in said.splitlines() if "help" in line or line.startswith("pipeline_")] == []
        assert status in (0, 3), said
