"""lm-evaluation-harness over HTTP: the figures that transformers gives for the same checkpoint, request for request.

The reference has the deployed weights: those that calibration wrote, times their scales.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.models.chat_template import ChatTemplate
from pipeline.serving.served import ServedDeployment
from tests.support import CHECKPOINTS
from tests.support.programs import CLIENTS, Program

ROOT = CLIENTS.parents[1]
CHOICES, QUESTIONS, MAX_TOKENS = 4, 12, 48


class Reference:
    """The deployed checkpoint in transformers."""

    def __init__(self, package: Path) -> None:
        manifests = [json.loads(path.read_text()) for path in package.parent.glob("*/manifest.json")]
        artifacts = {manifest["digest"]: manifest for manifest in manifests}
        engine = json.loads((package / "manifest.json").read_text())["inputs"]["target"]
        calibrated = artifacts[artifacts[engine]["inputs"]["checkpoint"]]
        self.checkpoint = package.parent / calibrated["name"] / "hf"
        tensors = load_file(self.checkpoint / "model.safetensors")
        weights = {
            name: value.float() * tensors.get(f"{name}_scale", torch.ones(()))
            for name, value in tensors.items()
            if not name.endswith("_scale")
        }
        config = LlamaConfig.from_pretrained(CHECKPOINTS / "support-target")
        self.model = LlamaForCausalLM(config).eval()
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}, "tied to the embedding"
        self.tokenizer = Tokenizer.from_file(str(self.checkpoint / "tokenizer.json"))
        self.template = ChatTemplate.from_directory(self.checkpoint)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @torch.inference_mode()
    def log_likelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Of the continuation, and whether it is the greedy one; white space at the border belongs to it."""
        bare = context.rstrip()
        continuation, context = context[len(bare) :] + continuation, bare
        ids, border = self.encode(context + continuation), len(self.encode(context))
        log_probs = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)[border - 1 : -1]
        own = torch.tensor(ids[border:])
        greedy = bool((log_probs.argmax(-1) == own).all())
        return float(log_probs.gather(1, own[:, None]).sum()), greedy

    @torch.inference_mode()
    def answer(self, messages: list[dict[str, str]]) -> str:
        ids = self.encode(self.template.render(messages))
        prompt = len(ids)
        ends = {self.tokenizer.token_to_id(token) for token in ("<|eot_id|>", "<|end_of_text|>")}
        while len(ids) < prompt + MAX_TOKENS:
            token = int(self.model(torch.tensor([ids])).logits[0, -1].argmax())
            if token in ends:
                break
            ids.append(token)
        text: str = self.tokenizer.decode(ids[prompt:])
        return text


@pytest.fixture(scope="module")
def reference(served: ServedDeployment) -> Reference:
    return Reference(served.record.deployment.parent)


@pytest.fixture(scope="module")
def evaluate(
    program: Callable[[str], Program], variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Runs a task with a kind of model; returns its figures, and its samples in the order of the documents."""

    def run(model: str, endpoint: str, task: str, *options: object, **arguments: object) -> Any:
        folder = tmp_path_factory.mktemp(task)
        (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents()))
        template = (CLIENTS / "lm_eval" / f"{task}.yaml").read_text()
        (folder / f"{task}.yaml").write_text(template.replace("DATA", str(folder / "data.jsonl")))
        given = {
            "model": variables["MODEL"],
            "base_url": f"{variables['GATEWAY_URL']}{endpoint}",
            **arguments,
        }
        installed = program("lm_eval")
        installed.call(
            [
                installed.command("lm_eval"), "--model", model, "--tasks", task, "--include_path", folder,
                "--model_args", ",".join(f"{name}={value}" for name, value in given.items()),
                "--log_samples", "--output_path", folder / "out", *options,
            ],
            timeout_s=900, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
        )  # fmt: skip
        (results,) = (folder / "out").rglob("results_*.json")
        (samples,) = (folder / "out").rglob("samples_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        return json.loads(results.read_text())["results"][task], sorted(
            lines, key=lambda line: int(line["doc_id"])
        )

    return run


def documents() -> Iterator[dict[str, Any]]:
    """Questions with their replies, and with the replies to others."""
    template = ChatTemplate.from_directory(CHECKPOINTS / "support-target")
    lines = (ROOT / "calibration" / "support" / "heldout.jsonl").read_text().splitlines()
    dialogues = [dialogue for dialogue in map(json.loads, lines) if len(dialogue["messages"]) == 2]
    for index in range(QUESTIONS):
        mine = dialogues[index]
        others = [
            other_line for other_line in dialogues[index + 1 :] if other_line["intent"] != mine["intent"]
        ][: CHOICES - 1]
        replies = [other_line["messages"][1]["content"] for other_line in others]
        reply = mine["messages"][1]["content"]
        replies.insert(index % CHOICES, reply)
        question = mine["messages"][0]["content"]
        prompt = template.render([{"role": "user", "content": question}])
        yield {
            "question": question, "prompt": prompt, "choices": replies, "answer": index % CHOICES, "reply": reply
        }  # fmt: skip


def test_multiple_choice(evaluate: Callable[..., Any], reference: Reference) -> None:
    figures, samples = evaluate(
        "local-completions", "/v1/completions", "support_choice", "--batch_size", CHOICES,
        max_length=512, num_concurrent=4,
    )  # fmt: skip
    assert len(samples) == QUESTIONS
    right, right_by_length = 0, 0
    for sample in samples:
        asked = [(argument["arg_0"], argument["arg_1"]) for argument in sample["arguments"].values()]
        expected = [reference.log_likelihood(*pair) for pair in asked]
        told = [(float(value), str(greedy) == "True") for value, greedy in sample["filtered_resps"]]
        assert [value for value, _ in told] == pytest.approx(
            [value for value, _ in expected], rel=1e-3, abs=1e-3
        )
        assert [greedy for _, greedy in told] == [greedy for _, greedy in expected]
        values, choices = [value for value, _ in expected], sample["doc"]["choices"]
        by_length = [value / len(choice) for value, choice in zip(values, choices, strict=True)]
        right += values.index(max(values)) == sample["doc"]["answer"]
        right_by_length += by_length.index(max(by_length)) == sample["doc"]["answer"]
    assert figures["acc,none"] == pytest.approx(right / QUESTIONS)
    assert figures["acc_norm,none"] == pytest.approx(right_by_length / QUESTIONS)
    assert right > QUESTIONS / CHOICES, "the model knows more than chance"


def test_answers_to_chats(evaluate: Callable[..., Any], reference: Reference) -> None:
    figures, samples = evaluate(
        "local-chat-completions", "/v1/chat/completions", "support_chat", "--apply_chat_template",
        num_concurrent=4,
    )  # fmt: skip
    answers = [
        reference.answer([{"role": "user", "content": sample["doc"]["question"]}]) for sample in samples
    ]
    assert [sample["filtered_resps"][0] for sample in samples] == answers
    exact = [answer == sample["doc"]["reply"] for answer, sample in zip(answers, samples, strict=True)]
    assert figures["exact_match,none"] == pytest.approx(sum(exact) / QUESTIONS)
