"""From a recipe to what is known of its build before anything is made: facts, plan, findings, report.

    prepared = prepare(recipe, store)      # for `pipeline build`: refused, or a plan and its warnings
    report.make_report(recipe, store)      # for `pipeline plan`: memory, speed, findings, alternatives as well
    check_recipe_file(path)                # for `pipeline recipes validate`: no store, no network

facts.py does all I/O, model_probe.py that about models which may not be here; all else computes. Making artifacts is
the business of `pipeline.stages`, which builds on what `prepare` returns.
"""

from pipeline.prepare.facts import RecipeFacts
from pipeline.prepare.prepare import Prepared, check_recipe, check_recipe_file, prepare, step_states

__all__ = ["Prepared", "RecipeFacts", "check_recipe", "check_recipe_file", "prepare", "step_states"]
