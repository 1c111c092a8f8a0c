"""Steps that ask: streams, golden questions, upstream's client, the draft, cancellation, the gate on answers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.bench.accept.judging import at_least, at_most, expect, skipped
from pipeline.bench.accept.making import build, serve
from pipeline.bench.accept.report import AcceptanceCheck
from pipeline.bench.accept.state import REQUESTS, TIMEOUT_S, AcceptanceRun, Checks, DraftedTexts, questions
from pipeline.bench.accept.upstream import END_TO_END, end_to_end, run_upstream_client
from pipeline.bench.engine_model import EngineModel
from pipeline.bench.load import Period
from pipeline.bench.workload import ScriptedConversation, Turn
from pipeline.client import Client
from pipeline.contracts.launching import upstream_clients
from pipeline.errors import ServerError
from pipeline.golden import GoldenSet
from pipeline.plan.plan import TARGET, evaluated_exports
from pipeline.recipe import load_recipe
from pipeline.serving.live import MetricsPage
from pipeline.stages.evaluate.engine_answers import EngineAnswer, engine_perplexity, score_answers
from pipeline.stages.evaluate.results import Export
from pipeline.triton.deployment import ENTRY

ENSEMBLE = "ensemble"
_SETTLED_S, _POLL_S = 60.0, 0.25
_LEAVES_AT = 0.1  # share of an answer after which its client leaves: all streams have begun by then


def stream(run: AcceptanceRun) -> Checks:
    """Stream an answer from each model that clients may ask, and through the gateway."""
    question, expected = questions(1)[0], ""
    tokens = min(48, run.deployment.limits.max_output_tokens)
    for model in (run.deployment.entry_model, *([ENSEMBLE] if ENSEMBLE in run.deployment.models else [])):
        with (
            run.client(model) as client,
            client.stream(question, temperature=0.0, max_tokens=tokens) as answer,
        ):
            parts = [chunk.text for chunk in answer if chunk.text]
            whole = client.generate(question, temperature=0.0, max_tokens=tokens)
        expected = expected or whole.text
        yield expect(
            f"{model}: joined chunks",
            "".join(parts) == whole.text == expected and bool(parts),
            "the text of a whole answer, of each model",
            f"{len(parts)} chunks, {len(whole.text)} characters",
            "" if "".join(parts) == whole.text else f"{''.join(parts)!r} is not {whole.text!r}",
        )
        yield expect(f"{model}: it streams", len(parts) > 1, "more than 1 chunk", f"{len(parts)} chunks")
        yield expect(
            f"{model}: end", whole.finish_reason in ("stop", "length"), "a reason", whole.finish_reason
        )
    if not run.up.record.gateway_url:
        yield skipped("gateway", "pipeline serve runs none here")
        return
    reply = run.ask_gateway(question, tokens)
    same = reply.outcome == "complete" and reply.text == expected
    yield expect(
        "gateway: joined events",
        same,
        "the text that Triton streams",
        f"{reply.stats.chunks} events",
        "" if same else reply.error or f"{reply.text!r} is not {expected!r}",
    )


def golden(run: AcceptanceRun) -> Checks:
    """Ask the recipe's golden questions."""
    golden_set = GoldenSet.load(run.built)
    if golden_set is None:
        yield skipped("golden questions", "the recipe has none")
        return
    longest = run.deployment.limits.max_output_tokens
    with run.client() as client:
        report = golden_set.ask(
            lambda prompt: (
                client.generate(prompt.input, temperature=0.0, max_tokens=prompt.max_tokens or longest).text
            )
        )
    right, count = report.right, len(report.answers)
    note = "" if report.passed else str(report)
    yield at_least("golden questions", right / count, report.min_passed, "%", note=note)


def upstream(run: AcceptanceRun) -> Checks:
    """Run upstream's own client, or send its requests where the file is not installed."""
    folder = run.settings.upstream or Path(upstream_clients())
    models = [name for name in (ENSEMBLE, ENTRY) if name in run.deployment.models]
    if not models:
        yield skipped(
            "end_to_end_grpc_client", "it asks ensemble and tensorrt_llm_bls, which this runtime has not"
        )
        return
    file, tokens = folder / END_TO_END, min(20, run.deployment.limits.max_output_tokens)
    how = "upstream's file" if file.is_file() else "its requests, sent by us: its file is not on this machine"
    prompts = [run.template.render(question) for question in questions(2)]
    for model in models:
        with run.client(model) as client:
            texts = [client.generate(prompt, temperature=0.0, max_tokens=tokens).text for prompt in prompts]
        for streaming in (True, False):
            name = f"end_to_end_grpc_client, {model}, {'streamed' if streaming else 'whole'}"
            url = run.up.record.target
            if file.is_file():
                fault = run_upstream_client(
                    file, url, model, prompts[0], texts[0], max_tokens=tokens, streaming=streaming
                )
            else:
                read = end_to_end(url, model, prompts, max_tokens=tokens, streaming=streaming)
                fault = "" if read == texts else f"{read} is not {texts}"
            yield expect(name, not fault, "the greedy answer", fault or "the same", how)


def draft(run: AcceptanceRun) -> Checks:
    """Check that greedy answers with the draft equal those without it."""
    if run.recipe.draft is None:
        yield skipped("draft equality", "the recipe has no draft")
        return
    with run.client() as client:
        # A number that is asked for is kept; otherwise drafts are proposed only while that pays.
        wanted = {"num_draft_tokens": run.deployment.limits.max_draft_tokens} if run.separate_draft else {}
        run.drafted = _texts(run, client, **wanted)
        proposed, accepted = run.drafted.proposed, run.drafted.accepted
        counts = f"{proposed} proposed, {accepted} accepted"
        if run.separate_draft or proposed:
            yield expect("the draft is used", proposed > 0, "tokens are proposed", counts)
        else:
            note = "the engine drafts by itself, while that pays"
            yield AcceptanceCheck("the draft is used", "measured", "", counts, note=note)
        if run.separate_draft:
            yield from _same(run, run.drafted, _texts(run, client, **run.undrafted))
        else:
            yield skipped(
                "greedy with draft = greedy without", "the engine drafts by itself: see the step undrafted"
            )


def undrafted(run: AcceptanceRun) -> Checks:
    """Serve the recipe without its draft, for engines that cannot leave it out per request."""
    if run.drafted is None or run.separate_draft:
        yield skipped("greedy with draft = greedy without", "not needed: see the step draft")
        return
    overrides = (*run.recipe.provenance.overrides, "draft=null")
    plain = load_recipe(str(run.recipe.provenance.file), overrides)
    other = replace(
        run, recipe=plain, logs=run.logs / "undrafted", figures={}, prepared=None, package=None, served=None
    )
    try:
        for step in (build, serve):
            yield from step(other)
        with other.client() as client:
            yield from _same(run, run.drafted, _texts(other, client))
    finally:
        if other.served is not None:
            other.served.stop()


def _texts(run: AcceptanceRun, client: Client, **sampling: Any) -> DraftedTexts:
    prompts, tokens = questions(run.settings.load.questions), min(64, run.deployment.limits.max_output_tokens)
    answers = [client.generate(prompt, temperature=0.0, max_tokens=tokens, **sampling) for prompt in prompts]
    return DraftedTexts(
        tuple(answer.text for answer in answers),
        sum(answer.stats.draft_tokens or 0 for answer in answers),
        sum(answer.stats.accepted_tokens or 0 for answer in answers),
    )


def _same(run: AcceptanceRun, drafted: DraftedTexts, alone: DraftedTexts) -> Checks:
    """Compare answers with a draft to those without."""
    pairs, tokenizer = list(zip(drafted.texts, alone.texts, strict=True)), run.tokenizer
    same = sum(first == second for first, second in pairs)
    agreement = _agreement(
        [(tokenizer.encode(first).ids, tokenizer.encode(second).ids) for first, second in pairs]
    )
    run.figures |= {"proposed": drafted.proposed, "accepted": drafted.accepted, "equal": same}
    # Kernels of a GPU may round one token differently in a step of several: then a tie falls otherwise.
    limit = run.gate.min_top1_agreement if run.on_gpu else 1.0
    note = f"{same} of {len(pairs)} answers are equal; tokens up to a first difference are counted"
    yield at_least("greedy with draft = greedy without", agreement, limit, "%", note=note)
    proposed = f"{alone.proposed} proposed"
    yield expect("without it none is used", alone.proposed == 0, "no token is proposed", proposed)


def _agreement(pairs: Sequence[tuple[list[int], list[int]]]) -> float:
    """Share of tokens that are equal, of those up to the first difference of each pair."""
    equal = differing = 0
    for first, second in pairs:
        both = zip(first, second, strict=False)
        same = next((index for index, (a, b) in enumerate(both) if a != b), min(len(first), len(second)))
        equal += same
        differing += same < max(len(first), len(second))
    return equal / max(1, equal + differing)


def cancel(run: AcceptanceRun) -> Checks:
    """Start as many long answers as the limits admit, and cancel each after a tenth of its tokens."""
    limits, exact = run.deployment.limits, run.takes_exact_lengths
    streams = limits.max_concurrency
    conversations = (
        ScriptedConversation((Turn(text, limits.max_output_tokens, exact),), chat=False, leaves_at=_LEAVES_AT)
        for text in run.prompts(streams, min(32, limits.max_input_tokens))
    )
    period = Period(None, streams, grace_s=TIMEOUT_S)
    left = run.load(streams, conversations, period, {"temperature": 1.0, "top_k": 50}).requests["left"]
    yield expect("streams that were left", left == streams, str(streams), str(left))
    began = time.monotonic()
    with run.client() as client:
        after = client.generate(questions(1)[0], temperature=0.0, max_tokens=8)
    yield expect("the next request", bool(after.text), "an answer", f"after {time.monotonic() - began:.2f} s")
    active = _active(run)
    if active is None:
        yield skipped(
            "requests in the engine afterwards", "Triton's metrics page of this runtime does not tell them"
        )
        return
    while active and time.monotonic() - began < _SETTLED_S:
        time.sleep(_POLL_S)
        active = _active(run)
    measured = f"{active or 0:g} after {time.monotonic() - began:.1f} s"
    yield expect("requests in the engine afterwards", not active, "0", measured)


def _active(run: AcceptanceRun) -> float | None:
    page = MetricsPage.fetch(run.up.record.metrics_url)
    return None if page is None else page.total(REQUESTS, request_type="active")


def answers(run: AcceptanceRun) -> Checks:
    """Generate greedy answers to held-out text with the engine's own model, for the step `gate`."""
    if run.recipe.runtime.kind == "pytorch":
        tokenizer = run.tokenizer
        with run.client() as client:
            for ids in _heldout(run):
                prompt = tokenizer.decode(list(ids), skip_special_tokens=True)
                ids_again = tokenizer.encode(prompt).ids
                answer = client.generate(prompt, temperature=0.0, max_tokens=32).text
                whole = tokenizer.encode(prompt + answer).ids
                if whole[: len(ids_again)] == ids_again:
                    run.answers.append(EngineAnswer(tuple(ids_again), tuple(whole[len(ids_again) :])))
    else:
        model = EngineModel(run.up.record.target, run.deployment.end_id, run.deployment.pad_id)
        most = min(64, run.deployment.limits.max_output_tokens)
        run.answers = model.answers([(prompt, most) for prompt in _heldout(run)])
    tokens = sum(len(answered.tokens) for answered in run.answers)
    yield expect(
        "answers to held-out text", tokens > 0, "tokens", f"{tokens} tokens of {len(run.answers)} answers"
    )


def _heldout(run: AcceptanceRun) -> list[list[int]]:
    """Read the beginnings of held-out samples: of the recipe's set where it is calibrated, else of the packaged one."""
    count, limits = run.settings.load.questions, run.deployment.limits
    dataset = None
    if run.prepared is not None and "dataset" in run.prepared.plan:
        dataset = run.store.find(run.prepared.plan["dataset"].key)
    if dataset is None:
        tokenizer = run.tokenizer
        prompts = (run.template.render(question) for question in questions(count))
        return [tokenizer.encode(text).ids[: limits.max_input_tokens] for text in prompts]
    lines = (dataset.path / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    samples = [json.loads(line)["tokens"] for line in lines]
    return [sample[: max(1, min(len(sample) // 2, limits.max_input_tokens))] for sample in samples]


def gate(run: AcceptanceRun) -> Checks:
    """Score the engine's answers with the checkpoint that it was built from, and with the original."""
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
    perplexity = engine_perplexity(run.answers)
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
        if index == 0 and perplexity is not None:
            run.figures["engine_perplexity"] = perplexity
            yield at_most(
                f"perplexity by the engine off that by {name}",
                abs(perplexity / scores.perplexity - 1),
                limits.max_perplexity_increase,
                "%",
                note=f"{perplexity:.4f} by the engine, {scores.perplexity:.4f} by the other",
            )
    if perplexity is None:
        yield skipped("perplexity by the engine", "this runtime returns no log probabilities")
