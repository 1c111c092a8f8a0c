"""Arguments that several verbs share. No logic of a verb is here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from pipeline.recipe import load_recipe

Function = Callable[..., Any]

set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Replace a value of the recipe, such as limits.max_concurrency=4. May be repeated.",
)  # fmt: skip


def recipe_argument(function: Function) -> Function:
    """Give a verb the argument RECIPE and the option --set; its `recipe` parameter is the loaded Recipe.

    A recipe that is wrong raises InvalidInput before the verb runs.
    """

    @click.argument("recipe", metavar="RECIPE")
    @set_option
    @functools.wraps(function)
    def with_recipe(*args: Any, recipe: str, overrides: tuple[str, ...], **options: Any) -> Any:
        return function(*args, recipe=load_recipe(recipe, overrides), **options)

    return with_recipe
