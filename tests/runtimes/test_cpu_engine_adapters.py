"""LoRA adapters of the cpu engine: logits of peft, any mixture of adapters in one step, and no state that is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import StageError
from pipeline.progress import Silent
from pipeline.runtimes.cpu.engine import EngineRequest, InvalidRequest
from pipeline.runtimes.cpu.engine.core import EngineCore
from pipeline.runtimes.cpu.ir import build_ir
from pipeline.runtimes.cpu.model_repository import write_adapters
from tests.support.adapters import ADAPTERS, BASES, LOGITS, PROMPT, make_adapter, make_base
from tests.support.engine import Answer, add, answer, finish_all, load, prompts, request
from tests.support.models import quantize_checkpoint

NAMES = ("", *ADAPTERS)


class Family:
    """A base and its adapters, built for the engine."""

    def __init__(self, folder: Path, family: str) -> None:
        self.checkpoint = make_base(folder / "base", family)
        folders = {
            name: make_adapter(folder / name, self.checkpoint, **settings)
            for name, settings in ADAPTERS.items()
        }
        self.target, self.stack = folder / "target", folder / "adapters.npz"
        facts = build_ir(self.checkpoint, self.target, adapters=True, progress=Silent())
        write_adapters(folders, facts["linears"], self.stack)

    def load(self, **settings: Any) -> EngineCore:
        return load(self.target, adapters=self.stack, guides=False, **settings)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    return {name: Family(tmp_path_factory.mktemp(name), name) for name in BASES}


@pytest.fixture(scope="module")
def llama(families: dict[str, Family]) -> Family:
    return families["llama"]


def asked(name: object, adapter: str, prompt: list[int], tokens: int = 12, **more: Any) -> EngineRequest:
    return request(name, [token % 300 for token in prompt], tokens, adapter=adapter, **more)


def logits(core: EngineCore, *adapters: str) -> dict[str, np.ndarray]:
    """Logits after each token of PROMPT by adapter, all computed together."""
    wanted = [asked(name or "base", name, PROMPT, 1, context_logits=True, logits=True) for name in adapters]
    found = {}
    for name, got in zip(adapters, answer(core, *wanted), strict=True):
        last = got.outputs[0].logits
        assert last is not None
        found[name] = np.stack([*got.context_logits, last[0]])
    return found


@pytest.mark.parametrize("family", BASES)
def test_logits_are_those_of_peft_whatever_runs_beside(families: dict[str, Family], family: str) -> None:
    found = logits(families[family].load(max_concurrency=8), *NAMES)
    with np.load(LOGITS) as recorded:
        for name in ADAPTERS:
            peft = recorded[f"{family}.{name}"]
            np.testing.assert_allclose(found[name], peft, atol=1e-4 * np.abs(peft).max())
            # The base is far away, so that this is worth its name.
            assert np.abs(peft - found[""]).max() > 0.05 * np.abs(peft).max()


def test_any_mixture_gives_the_tokens_of_each_alone(llama: Family) -> None:
    random = np.random.default_rng(5)
    texts = prompts(12, longest=90, vocab=300)
    chosen = [NAMES[number] for number in random.integers(0, len(NAMES), len(texts))]
    wanted = [asked(at, name, text) for at, (name, text) in enumerate(zip(chosen, texts, strict=True))]
    single = llama.load(max_concurrency=1)
    alone = [answer(single, wanted_request)[0].tokens for wanted_request in wanted]
    core = llama.load(max_concurrency=8, max_batch_tokens=64)
    sinks = [Answer() for _ in wanted]
    for wanted_request, sink in zip(wanted, sinks, strict=True):
        add(core, wanted_request, sink)
        core.step()  # they join while others run
    finish_all(core)
    assert [sink.tokens for sink in sinks] == alone


def test_a_prefix_is_reused_within_an_adapter_and_never_across(llama: Family) -> None:
    core = llama.load()
    text = [*range(8, 108)]
    first = {name: answer(core, asked(f"{name}-1", name, text))[0] for name in NAMES}
    again = {name: answer(core, asked(f"{name}-2", name, text))[0] for name in NAMES}
    for name in NAMES:
        assert first[name].metrics.kv_blocks_reused == 0, name
        assert again[name].metrics.kv_blocks_reused == 3, name
        assert again[name].tokens == first[name].tokens
    assert len({tuple(answered.tokens) for answered in first.values()}) == len(NAMES)


def test_a_draft_without_adapters_changes_no_answer(llama: Family) -> None:
    """The draft is the base itself: its proposals are right for the base, and often wrong for an adapter."""
    texts = prompts(len(NAMES), vocab=300, seed=3)
    wanted = [asked(at, name, text, 24) for at, (name, text) in enumerate(zip(NAMES, texts, strict=True))]
    plain = [wanted_request.tokens for wanted_request in answer(llama.load(), *wanted)]
    core = llama.load(draft=llama.target, max_draft_tokens=4, adapt_speculation=False)
    drafted = answer(core, *wanted)
    assert [answered.tokens for answered in drafted] == plain
    rates = [
        answered.metrics.draft_tokens_accepted / answered.metrics.draft_tokens_total for answered in drafted
    ]
    assert rates[0] == 1.0
    assert min(rates) < 0.9


def test_proposals_of_the_caller_are_judged_by_the_adapter(llama: Family) -> None:
    core = llama.load()
    right = {name: answer(core, asked(name, name, PROMPT, 6))[0].tokens for name in NAMES}
    for name in NAMES:
        for other in NAMES:
            drafted_request = asked(f"{name}/{other}", name, PROMPT, 6, draft_tokens=tuple(right[other][:4]))
            assert answer(core, drafted_request)[0].tokens == right[name]


def test_a_quantized_base_adds_the_adapter_to_its_own_product(llama: Family, tmp_path: Path) -> None:
    """The product of the adapter is not rounded: the adapted logits differ from peft's no more than the base's do."""
    quantized = quantize_checkpoint(llama.checkpoint, tmp_path / "fp8", "fp8")
    facts = build_ir(quantized, tmp_path / "ir", adapters=True, progress=Silent())
    folder = make_adapter(tmp_path / "all", llama.checkpoint, **ADAPTERS["all"])
    write_adapters({"all": folder}, facts["linears"], tmp_path / "one.npz")
    exact = logits(llama.load(), "", "all")
    rounded = logits(load(tmp_path / "ir", adapters=tmp_path / "one.npz", guides=False), "", "all")
    error = {name: np.abs(rounded[name] - exact[name]).max() for name in ("", "all")}
    assert 0 < error["all"] < 4 * error[""] < np.abs(exact["all"] - exact[""]).max()


def test_unknown_names_are_refused_with_the_list(llama: Family) -> None:
    with pytest.raises(InvalidRequest, match="adapter = 'sql': is unknown; there are all, attention"):
        llama.load().check(asked("1", "sql", PROMPT))
    with pytest.raises(InvalidRequest, match="this engine has no adapters"):
        load(llama.target, guides=False).check(asked("1", "all", PROMPT))


def test_an_adapter_of_other_layers_is_not_packaged(llama: Family, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "one", llama.checkpoint, targets=("up_proj", "down_proj"))
    with pytest.raises(
        StageError, match=r"adapter one: the model has no linear layer model\.layers\.0\.mlp\.down_proj"
    ):
        write_adapters({"one": folder}, ["model.layers.0.mlp.up_proj"], tmp_path / "one.npz")
