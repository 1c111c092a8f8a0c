"""Names that requests may have: those of the recipes, and their aliases, each of one model."""

from __future__ import annotations

import pytest

from pipeline.cli.discovery import _faults_of_aliases
from pipeline.errors import InvalidInput
from pipeline.recipe import load_recipe


def test_a_name_of_two_models_is_refused() -> None:
    one = load_recipe("tiny-cpu", ["serving.aliases=[gpt, shared]"])
    other = load_recipe("tiny-cpu", ["name=other", "serving.aliases=[tiny-cpu, shared]"])
    assert _faults_of_aliases([one]) == []
    assert _faults_of_aliases([one, other]) == [
        "tiny-cpu: is a name of tiny-cpu and of other: change serving.aliases",
        "shared: is a name of tiny-cpu and of other: change serving.aliases",
    ]


@pytest.mark.parametrize("aliases", ["[a, a]", "['']", "['a b']", "gpt"])
def test_what_is_no_alias_is_refused(aliases: str) -> None:
    with pytest.raises(InvalidInput, match=r"serving\.aliases"):
        load_recipe("tiny-cpu", [f"serving.aliases={aliases}"])
