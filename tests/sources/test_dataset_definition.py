"""calibration/<name>.yaml: the ones that travel with the package, and every kind of fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.document_faults import read_yaml
from pipeline.errors import InvalidInput, UserError
from pipeline.sources.dataset import DatasetDefinition, known_sets, read_definition

GOOD = {
    "name": "news",
    "format": "text",
    "column": "article",
    "splits": {"train": "a.parquet", "heldout": "b.parquet"},
    "hub": {"repo": "org/name", "revision": "0" * 40},
}


def parse(folder: Path, content: object) -> object:
    path = folder / "news.yaml"
    path.write_text(yaml.safe_dump(content))
    return read_yaml(DatasetDefinition, path)


@pytest.mark.parametrize("name", known_sets())
def test_the_sets_of_the_package_can_be_read(name: str) -> None:
    definition = read_definition(name)
    assert definition.name == name
    assert definition.license
    assert definition.splits.heldout


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"formt": "text"}, "formt = text: is not a key (did you mean format?"),
        ({"format": "csv"}, "format = csv: is not known (one of messages, text)"),
        ({"name": None}, "name = null: is empty; it must be text"),
        ({"format": "messages"}, "column goes with format text only"),
        ({"splits": {"heldout": "b"}}, "splits.train: is missing (such as my-set/train.jsonl)"),
        ({"hub": {"revision": "0" * 40}}, "hub.repo: is missing (such as organisation/name)"),
        (
            {"hub": {"repo": "org/name", "revision": "main"}},
            "hub.revision = main: must be a commit (40 hex digits)",
        ),
    ],
)
def test_faults_are_named_with_file_and_key(tmp_path: Path, change: dict[str, object], fault: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(tmp_path, GOOD | change)
    assert fault in str(caught.value)
    assert "news.yaml" in str(caught.value)


def test_all_faults_at_once_and_files_that_are_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="3 faults"):
        parse(tmp_path, {"name": 3, "format": "x"})
    with pytest.raises(InvalidInput, match="not a mapping of keys"):
        parse(tmp_path, ["a"])
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(UserError, match="is not YAML"):
        read_yaml(DatasetDefinition, tmp_path / "bad.yaml")
