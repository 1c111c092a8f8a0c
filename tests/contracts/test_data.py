"""The facts about upstream as data: each names its source, and the releases of which it holds are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import contracts
from pipeline.contracts.releases import releases

DATA = Path(contracts.__file__).parent / "data"
FILES = sorted(path.relative_to(DATA).as_posix() for path in DATA.rglob("*.yaml"))
# Folders that have one list of sources for all of their files.
SHARED = {"rules": "rules/sources.yaml", "inflight_batcher": "inflight_batcher/index.yaml"}


def read(file: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DATA / file).read_text("utf-8"))
    return content


def facts_of(content: Any) -> list[dict[str, Any]]:
    """All objects that name a source, however deep they lie."""
    inside = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    own = [content] if isinstance(content, dict) and "source" in content else []
    return own + [fact for part in inside for fact in facts_of(part)]


@pytest.mark.parametrize("file", [file for file in FILES if file != "tokenizer_corpus.yaml"])
def test_every_fact_names_sources_and_releases_that_are_known(file: str) -> None:
    sources = read(SHARED.get(file.partition("/")[0], file))["sources"]
    known = {None, *(release.version for release in releases())}
    facts = facts_of(read(file))
    for fact in facts:
        assert fact["source"], fact
        assert set(fact["source"]) <= set(sources), fact
        assert {fact.get("since"), fact.get("until"), *fact.get("perhaps", ())} <= known, fact
    assert facts or file in SHARED.values()


@pytest.mark.parametrize(
    ("file", "lists"),
    [
        ("trtllm_build.yaml", ("flags", "messages", "refusals", "recommended", "decided")),
        ("llm_args.yaml", ("versions", "speculation", "decoding_types", "decided")),
        ("llmapi.yaml", ("input", "output", "own_input", "own_output", "ignored_sampling", "triton_config")),
        ("build_errors.yaml", ("errors",)),
        ("build_log.yaml", ("phases",)),
        ("launching.yaml", ("causes",)),
    ],
)
def test_no_entry_lacks_a_source(file: str, lists: tuple[str, ...]) -> None:
    content = read(file)
    for name in lists:
        assert all("source" in entry for entry in content[name]), name
    for model, fields in content.get("models", {}).items():
        assert all("source" in field for field in fields), model
