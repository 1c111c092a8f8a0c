"""`pipeline cache tune`, end to end with a small encoder: from labelled pairs or a log to the lines of a recipe."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeline.cli.cache import command
from pipeline.errors import InvalidInput, UserError
from tests.support.encoder import write_cross_encoder, write_encoder

pytest.importorskip("onnx")
SAME = {"a": "Where is my parcel?", "b": "where is my parcel", "same": 1, "category": "plain"}


def same(count: int) -> list[dict[str, Any]]:
    """Pairs that one answer serves, each of other words."""
    asked = [f"Where is my parcel {number}?" for number in range(count)]
    return [{"a": text, "b": text.lower(), "same": 1, "category": "plain"} for text in asked]


def traps(count: int) -> list[dict[str, Any]]:
    """Pairs of different answers, which a guard forbids."""
    numbers = range(count)
    return [
        {"a": f"Is shop {n} open?", "b": f"Is shop {n} not open?", "same": 0, "category": "negation"}
        for n in numbers
    ]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that an embedder reads: random weights, of which the order of cosines is no matter here."""
    from pipeline.cache.semantic.onnx_export import write_onnx

    folder = write_encoder(tmp_path_factory.mktemp("tune") / "encoder")
    write_onnx(folder, folder / "model.onnx")
    return folder


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def tune(encoder: Path, file: Path, *options: str) -> Result:
    return CliRunner().invoke(command, ["tune", "--embedder", str(encoder), "--pairs", str(file), *options])


def survey(encoder: Path, file: Path, *options: str) -> Result:
    return CliRunner().invoke(command, ["tune", "--embedder", str(encoder), "--log", str(file), *options])


def test_enough_traps_show_that_the_budget_is_met(encoder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", same(40) + traps(400))
    result = tune(encoder, file, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["meets_budget"] is True
    assert found["chosen"]["recall"]["count"] == 40
    assert found["chosen"]["false_hits"]["count"] == 0
    assert found["shown"]["bound"] == pytest.approx(1 - 0.05 ** (1 / 400), abs=1e-5)
    assert found["held_out"] is None, "too few for two halves"
    page = tune(encoder, file).output
    assert "Only the score was chosen, and all pairs show it: 0 of 400 traps" in page


def test_few_traps_show_nothing_and_no_line_for_a_recipe_is_printed(encoder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", same(5) + traps(5))
    result = tune(encoder, file)
    assert result.exit_code == 1, result.output
    assert "Nothing is promised" in result.output
    assert "299 traps" in result.output
    assert "The smallest budget that they could show is 45.07%" in result.output
    assert "\ncache:\n" not in result.output
    found = json.loads(tune(encoder, file, "--json").stdout)
    assert (found["meets_budget"], found["basis"], found["traps_needed"]) == (False, "rate", 299)


def test_a_copy_of_a_pair_shows_nothing_new(encoder: Path, tmp_path: Path) -> None:
    """400 lines of one trap are one trap, and so it is the other way round."""
    turned = [{**row, "a": row["b"], "b": row["a"]} for row in traps(1)]
    result = tune(encoder, write(tmp_path / "pairs.jsonl", same(5) + traps(1) * 400 + turned * 400), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["chosen"]["false_hits"]["of"] == 1


def test_what_a_cache_does_not_share_is_not_served_here_either(encoder: Path, tmp_path: Path) -> None:
    unshared = [
        {"a": text, "b": text.upper(), "same": 1}
        for text in ("translate: my parcel", "где моя посылка", "is the shop 👍", "is my\nparcel open")
    ]
    file = write(tmp_path / "pairs.jsonl", same(40) + unshared + traps(400))
    found = json.loads(tune(encoder, file, "--json").stdout)
    assert found["chosen"]["recall"]["count"] == 40
    assert found["chosen"]["recall"]["of"] == 44


def test_the_lines_of_the_recipe_are_ones_that_a_recipe_takes(encoder: Path, tmp_path: Path) -> None:
    import yaml

    from pipeline.recipe import load_recipe

    shown = tune(encoder, write(tmp_path / "pairs.jsonl", same(5) + traps(400))).output
    section = yaml.safe_load(shown[shown.index("\ncache:\n") :])["cache"]
    recipe = load_recipe(
        "tiny-cpu", ["cache.enabled=true", f"cache.semantic={json.dumps(section['semantic'])}"]
    )
    assert recipe.cache.semantic is not None
    assert recipe.cache.semantic.mode == section["semantic"]["mode"] == "serve"
    assert recipe.cache.semantic.min_similarity == section["semantic"]["min_similarity"]
    assert recipe.cache.semantic.min_score == section["semantic"]["min_score"]


def test_a_cross_encoder_is_tried_beside_the_built_in_verifier(encoder: Path, tmp_path: Path) -> None:
    from pipeline.cache.semantic.onnx_export import write_onnx

    judge = write_cross_encoder(tmp_path / "judge")
    write_onnx(judge, judge / "model.onnx")
    alike = [
        {"a": f"Where is my parcel {n}?", "b": f"Where is the parcel {n}?", "same": 0} for n in range(900)
    ]
    file = write(tmp_path / "pairs.jsonl", same(40) + alike)
    found = json.loads(tune(encoder, file, "--verifier", str(judge), "--json").stdout)
    # Random weights know nothing: the same words are the same to the built-in verifier only.
    assert (found["chosen"]["verifier"], found["meets_budget"]) == ("built-in", True)
    assert "verifier: null" in tune(encoder, file, "--verifier", str(judge)).output
    kept = json.loads(tune(encoder, file, "--verifier", str(judge), "--keep-guards", "--json").stdout)
    assert kept["chosen"]["verifier"] == f"local:{judge}"
    refused = tune(encoder, file, "--verifier", str(encoder))
    assert isinstance(refused.exception, UserError)
    assert "gives" in str(refused.exception)


def test_a_log_gives_pairs_to_label_and_no_labels(encoder: Path, tmp_path: Path) -> None:
    asked = ["Where is my parcel?", "where is my parcel", "Is the shop open?", "Is the shop not open?"]
    log = write(
        tmp_path / "log.jsonl", [{"question": question, "scope": "00", "answer": "…"} for question in asked]
    )
    into = tmp_path / "label.jsonl"
    result = survey(encoder, log, "--output", str(into))
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in into.read_text(encoding="utf-8").splitlines()]
    assert rows
    assert stat.S_IMODE(into.stat().st_mode) == 0o600
    assert all(row["same"] is None and 0.5 <= row["similarity"] <= 1.0001 for row in rows)
    assert [row["similarity"] for row in rows] == sorted((row["similarity"] for row in rows), reverse=True)
    assert not any("not" in row["b"] for row in rows)
    assert all({row["a"], row["b"]} <= set(asked) for row in rows)
    refused = tune(encoder, into)
    assert isinstance(refused.exception, InvalidInput)
    assert "not labelled yet" in str(refused.exception)


def test_questions_of_two_scopes_are_never_a_pair(encoder: Path, tmp_path: Path) -> None:
    log = [
        {"question": text, "scope": scope}
        for scope, text in (("00", "Is the shop open?"), ("01", "is the shop open"))
    ]
    found = json.loads(survey(encoder, write(tmp_path / "log.jsonl", log), "--json").stdout)
    assert found["different"] == 2
    assert {row["near"] for row in found["thresholds"]} == {0}


def test_the_page_and_its_json_tell_of_guards_and_categories(encoder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", same(5) + traps(7))
    found = json.loads(tune(encoder, file, "--json").stdout)
    stopped = {row["guard"]: row["stopped_alone"] for row in found["guards"]}
    assert stopped["numbers"] == 0
    assert found["categories"]["plain"]["recall"]["count"] == 5
    assert found["categories"]["negation"]["false_hits"] == {**found["chosen"]["false_hits"]}
    page = tune(encoder, file).output
    assert "5 of 5" in page
    assert "0 of 7" in page


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tiny-cpu"], "give --pairs FILE or --log FILE"),
        (["tiny-cpu", "--pairs", "-", "--log", "-"], "give --pairs FILE or --log FILE"),
        (["--pairs", "-"], "give a RECIPE or --embedder FOLDER"),
        (["tiny-cpu", "--pairs", "-", "--output", "x"], "--output goes with --log"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(command, ["tune", *arguments], input="")
    assert result.exit_code == 2
    assert told in result.output


def test_a_folder_without_an_encoder(tmp_path: Path) -> None:
    result = tune(tmp_path, write(tmp_path / "pairs.jsonl", same(1) + traps(1)))
    assert isinstance(result.exception, UserError)
    assert "needs tokenizer.json and one of" in str(result.exception)


def test_the_encoder_of_a_recipe(encoder: Path, tmp_path: Path) -> None:
    setting = f"cache.semantic={{embedder: 'local:{encoder}'}}"
    file = write(tmp_path / "pairs.jsonl", same(5) + traps(5))
    arguments = [
        "tune",
        "tiny-cpu",
        "--set",
        "cache.enabled=true",
        "--set",
        setting,
        "--pairs",
        str(file),
        "--json",
    ]
    result = CliRunner().invoke(command, arguments)
    assert json.loads(result.stdout) == json.loads(tune(encoder, file, "--json").stdout)


def test_guards_of_a_recipe_are_known_ones_and_the_cache_asks_no_others(
    encoder: Path, tmp_path: Path
) -> None:
    from pipeline.cache.semantic.decision import CosineVerifier
    from pipeline.cache.semantic.layer import SemanticLayer
    from pipeline.recipe import load_recipe
    from pipeline.stages.response_cache import open_response_cache
    from pipeline.store import Store

    def given(guards: str) -> list[str]:
        return ["cache.enabled=true", f"cache.semantic={{embedder: 'local:{encoder}', guards: {guards}}}"]

    with pytest.raises(InvalidInput, match=r"guards\[1\] = poems: is not known .*one of numbers, names"):
        load_recipe("tiny-cpu", given("[numbers, poems]"))
    cache = open_response_cache(load_recipe("tiny-cpu", given("[names, numbers]")), Store(tmp_path))
    assert cache is not None
    assert isinstance(cache.semantic, SemanticLayer)
    assert isinstance(cache.semantic.verifier, CosineVerifier)
    assert cache.semantic.verifier.guards == ("names", "numbers")
    cache.close()
