"""The forecast of a recipe before anything is made. Values only; nothing is read but small files of local checkpoints.

    facts         `model_facts`, `machine_facts`: what is known, None where it is not (`pipeline.prepare` gathers them)
    functions     `memory`, `performance` and `preflight`: pure, from recipe and facts to figures and findings
    results       `plan`: the steps that a build executes (`pipeline.prepare.report` puts all of it together)

`parallelism` says over how many GPUs a model is spread, `compatibility` which releases, GPUs and formats go together.
"""
