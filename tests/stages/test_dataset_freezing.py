"""Freezing samples: the same bytes every time, the right text, and nothing silently left out."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipeline.errors import InvalidInput, SourceError, UserError
from pipeline.progress import Silent
from pipeline.recipe.source import LocalSource, NamedDataset
from pipeline.resources import folder
from pipeline.sources.dataset import dataset_identity
from pipeline.stages.dataset.freezing import SHORTEST, freeze, order
from tests.support.models import make_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    make_tokenizer(directory)
    return directory


def freeze_into(
    into: Path, dataset: LocalSource | NamedDataset, checkpoint: Path, **changed: Any
) -> dict[str, Any]:
    into.mkdir(parents=True)
    wanted = {"samples": 6, "max_tokens": 40, "seed": 7, "heldout_samples": 3} | changed
    return freeze(dataset, checkpoint, **wanted, into=into, progress=Silent())


def lines(path: Path) -> list[list[int]]:
    return [json.loads(line)["tokens"] for line in path.read_text().splitlines()]


def texts(path: Path, count: int = 30) -> LocalSource:
    path.write_text(
        "".join(json.dumps({"text": f"Order {n} is on its way to you."}) + "\n" for n in range(count))
    )
    return LocalSource(path)


def test_the_same_inputs_give_the_same_bytes_and_another_seed_others(
    tmp_path: Path, checkpoint: Path
) -> None:
    support = NamedDataset("support")
    for name, seed in (("one", 7), ("two", 7), ("three", 8)):
        freeze_into(tmp_path / name, support, checkpoint, seed=seed)
    for file in ("calibration.jsonl", "heldout.jsonl", "dataset.json"):
        first, two, three = ((tmp_path / name / file).read_bytes() for name in ("one", "two", "three"))
        assert first == two
        assert first != three


def test_more_samples_begin_with_the_same_ones(tmp_path: Path, checkpoint: Path) -> None:
    for count in (4, 8):
        freeze_into(tmp_path / str(count), NamedDataset("support"), checkpoint, samples=count)
    four, eight = (lines(tmp_path / count / "calibration.jsonl") for count in ("4", "8"))
    assert eight[:4] == four


def test_samples_are_templated_tokenized_and_cut(tmp_path: Path, checkpoint: Path) -> None:
    facts = freeze_into(tmp_path / "a", NamedDataset("support"), checkpoint)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    rows = [
        json.loads(line) for line in (folder("calibration") / "support/train.jsonl").read_text().splitlines()
    ]
    for tokens, row in zip(
        lines(tmp_path / "a/calibration.jsonl"), facts["calibration"]["rows"], strict=True
    ):
        said = rows[row]["messages"]
        text = "<|begin|>" + "".join(f"<|turn|>{m['role']}\n{m['content'].strip()}<|end|>" for m in said)
        assert tokens == tokenizer.encode(text, add_special_tokens=False).ids[:40]
        assert tokens.count(0) == 1  # one beginning, not the template's and the tokenizer's


def test_dataset_json_tells_where_they_come_from(tmp_path: Path, checkpoint: Path) -> None:
    freeze_into(tmp_path / "a", NamedDataset("support"), checkpoint)
    facts = json.loads((tmp_path / "a/dataset.json").read_text())
    for name in ("calibration", "heldout"):
        file = tmp_path / f"a/{name}.jsonl"
        assert facts[name]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        tokens = lines(file)
        assert facts[name]["samples"] == len(tokens) == len(facts[name]["rows"])
        assert facts[name]["tokens"] == sum(map(len, tokens))
        assert facts[name]["longest"] == max(map(len, tokens)) <= 40
    train = (folder("calibration") / "support/train.jsonl").read_bytes()
    assert facts["files"]["train"] == hashlib.sha256(train).hexdigest()
    assert facts["prompt"]["text"]
    assert facts["prompt"]["tokens"]


def test_one_file_serves_both_and_they_share_nothing(tmp_path: Path, checkpoint: Path) -> None:
    facts = freeze_into(
        tmp_path / "a", texts(tmp_path / "set.jsonl"), checkpoint, samples=20, heldout_samples=10
    )
    assert not set(facts["calibration"]["rows"]) & set(facts["heldout"]["rows"])
    calibration, heldout = (
        set(map(tuple, lines(tmp_path / f"a/{n}.jsonl"))) for n in ("calibration", "heldout")
    )
    assert not calibration & heldout
    assert (len(calibration), len(heldout)) == (20, 10)


def test_too_few_samples_say_what_became_of_the_rows(tmp_path: Path, checkpoint: Path) -> None:
    rows = [*["Good morning, where is my parcel?"] * 4, "", "hm", "My invoice of May is wrong, please."]
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    with pytest.raises(UserError) as caught:
        freeze_into(tmp_path / "a", LocalSource(path), checkpoint)
    message = str(caught.value)
    assert "calibration: 6 samples asked for, 2 usable of 7 rows" in message
    assert "3 passed over: the same as another sample" in message
    assert f"2 passed over: shorter than {SHORTEST} tokens" in message
    assert "held-out: 3 samples asked for, 0 usable" in message
    assert "allow_sample_count" in message
    assert not any((tmp_path / "a").iterdir())


def test_messages_that_the_template_refuses_are_counted(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    refuse = "{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
    template = refuse + "{{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    turn = {"role": "user", "content": "I would like to speak to a person."}
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps({"messages": [turn] * count}) + "\n" for count in (1, 2, 2, 2)))
    with pytest.raises(
        UserError, match="3 passed over: the chat template does not take these messages: one turn only"
    ):
        freeze_into(tmp_path / "a", LocalSource(path), tmp_path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"txt": "a"}', "text: must be text"),
        ('{"text": 3}', "text: must be text"),
        ('{"messages": []}', "messages: must be a list of messages"),
        ('{"messages": [{"content": "a"}]}', "every message needs a role"),
        ('{"messages": [{"role": "user", "content": null}]}', "every message needs a content"),
        ('{"text": "\udcff"}', "is not UTF-8: byte 0xff"),
        ('{"text": "\\ud83d"}', "which is half of a character"),
        ('{"text": ' + "[" * 9999, "is nested too deeply"),
    ],
)
def test_lines_that_are_wrong_are_all_named(
    tmp_path: Path, checkpoint: Path, line: str, problem: str
) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n\n{line}\n', "utf-8", "surrogateescape")
    with pytest.raises(InvalidInput) as caught:
        freeze_into(tmp_path / "a", LocalSource(path), checkpoint)
    assert [fault.line for fault in caught.value.faults] == [2, 4]
    assert problem in str(caught.value)


def test_what_does_not_exist(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"no calibration set 'wikitext'; known are .*support"):
        freeze_into(tmp_path / "a", NamedDataset("wikitext"), checkpoint)
    with pytest.raises(UserError, match=r"there is no file .*gone\.jsonl"):
        freeze_into(tmp_path / "b", LocalSource(tmp_path / "gone.jsonl"), checkpoint)
    (tmp_path / "bare").mkdir()
    with pytest.raises(SourceError, match=r"tokenizer\.json is missing"):
        freeze_into(tmp_path / "c", NamedDataset("support"), tmp_path / "bare")


def test_plain_text_needs_no_chat_template(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    facts = freeze_into(tmp_path / "a", texts(tmp_path / "set.jsonl"), tmp_path)
    assert facts["calibration"]["samples"] == 6
    with pytest.raises(SourceError, match="no chat template"):
        freeze_into(tmp_path / "b", NamedDataset("support"), tmp_path)


def test_identity_changes_with_the_files_and_not_with_their_place(tmp_path: Path) -> None:
    first = dataset_identity(texts(tmp_path / "set.jsonl"))
    (tmp_path / "sub").mkdir()
    assert dataset_identity(texts(tmp_path / "sub/set.jsonl")) == first
    assert dataset_identity(texts(tmp_path / "set.jsonl", count=31)) != first
    assert set(dataset_identity(NamedDataset("support"))["files"]) == {"train", "heldout"}


def test_identity_of_a_set_on_the_hub_asks_nobody() -> None:
    found = dataset_identity(NamedDataset("cnn_dailymail"))
    assert (found["repo"], len(found["revision"])) == ("abisee/cnn_dailymail", 40)


def test_neither_torch_nor_transformers_is_loaded() -> None:
    code = (
        "import sys, pipeline.stages.dataset, pipeline.stages.dataset.freezing;"
        "print([name for name in ('torch', 'transformers', 'modelopt') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@settings(max_examples=50)
@given(st.integers(0, 200), st.integers(0, 2**31 - 1))
def test_the_order_is_a_permutation_that_the_seed_fixes(rows: int, seed: int) -> None:
    drawn = order(rows, seed, "calibration")
    assert sorted(drawn) == list(range(rows))
    assert drawn == order(rows, seed, "calibration")


def test_the_order_never_changes_between_versions() -> None:
    assert order(8, 1234, "calibration") == [5, 0, 6, 1, 2, 3, 7, 4]
