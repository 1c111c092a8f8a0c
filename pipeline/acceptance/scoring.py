"""The gate on the engine's own answers: gathered while it is served, scored when it has given its memory back."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.acceptance.judging import at_least, at_most, expect, skipped
from pipeline.acceptance.run import AcceptanceRun, Checks, questions
from pipeline.bench.engine_model import EngineModel
from pipeline.errors import ServerError
from pipeline.plan.plan import TARGET, evaluated_exports
from pipeline.stages.evaluate.engine_answers import EngineAnswer, engine_perplexity, score_answers
from pipeline.stages.evaluate.results import Export


def answers(run: AcceptanceRun) -> Checks:
    """Greedy answers of the engine's own model to held-out text, token by token, for the step gate."""
    if run.recipe.runtime.kind == "pytorch":
        tokenizer = run.tokenizer
        with run.client() as client:
            for ids in _heldout(run):
                prompt = tokenizer.decode(list(ids), skip_special_tokens=True)
                given = tokenizer.encode(prompt).ids
                answer = client.generate(prompt, temperature=0.0, max_tokens=32).text
                whole = tokenizer.encode(prompt + answer).ids
                if whole[: len(given)] == given:
                    run.answers.append(EngineAnswer(tuple(given), tuple(whole[len(given) :])))
    else:
        model = EngineModel(run.up.record.target, run.deployment.end_id, run.deployment.pad_id)
        most = min(64, run.deployment.limits.max_output_tokens)
        run.answers = model.answers([(prompt, most) for prompt in _heldout(run)])
    tokens = sum(len(one.tokens) for one in run.answers)
    yield expect(
        "answers to held-out text", tokens > 0, "tokens", f"{tokens} tokens of {len(run.answers)} answers"
    )


def _heldout(run: AcceptanceRun) -> list[list[int]]:
    """The beginnings of held-out samples: of the recipe's set where it is calibrated, else of the packaged one."""
    count, limits = run.options.questions, run.deployment.limits
    found = None
    if run.prepared is not None and "dataset" in run.prepared.plan:
        found = run.store.find(run.prepared.plan["dataset"].key)
    if found is None:
        tokenizer = run.tokenizer
        asked = (run.template.render(one) for one in questions(count))
        return [tokenizer.encode(text).ids[: limits.max_input_tokens] for text in asked]
    lines = (found.path / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    samples = [json.loads(line)["tokens"] for line in lines]
    return [sample[: max(1, min(len(sample) // 2, limits.max_input_tokens))] for sample in samples]


def gate(run: AcceptanceRun) -> Checks:
    """The engine's own answers, scored by the checkpoint that it was made from and by the original."""
    if not run.answers:
        yield skipped("gate on the engine's answers", "there are none: see the step answers")
        return
    if run.prepared is None:
        raise ServerError("the plan of the build is not known: see the step build")
    steps, limits = run.prepared.plan, run.gate
    original = run.store.find(steps[f"fetch.{TARGET}"].key)
    if original is None:
        yield skipped(
            "gate on the engine's answers", "the store has no checkpoint: the package was made elsewhere"
        )
        return
    names: list[tuple[str, Path | Export]] = [("the original", original.path)]
    calibrate = f"calibrate.{TARGET}"
    if calibrate in steps and (calibrated := run.store.find(steps[calibrate].key)) is not None:
        loaded = evaluated_exports(run.recipe)[0]
        names.insert(0, ("the checkpoint", Export(calibrated.path / loaded.folder, loaded.kv_scale)))
    said = engine_perplexity(run.answers)
    for index, (name, checkpoint) in enumerate(names):
        scores = score_answers(checkpoint, run.answers, reference=original.path, progress=run.progress)
        run.figures[name] = {
            "positions": scores.positions,
            "agreement": scores.agreement,
            "perplexity": scores.perplexity,
        }
        yield at_least(
            f"top-1 agreement with {name}",
            scores.agreement,
            limits.min_top1_agreement,
            "%",
            note=f"over {scores.positions} tokens of {len(run.answers)} answers; the limit is the recipe's gate",
        )
        if index == 0 and said is not None:
            run.figures["engine_perplexity"] = said
            yield at_most(
                f"perplexity by the engine off that by {name}",
                abs(said / scores.perplexity - 1),
                limits.max_perplexity_increase,
                "%",
                note=f"{said:.4f} by the engine, {scores.perplexity:.4f} by the other",
            )
    if said is None:
        yield skipped("perplexity by the engine", "this runtime returns no log probabilities")
