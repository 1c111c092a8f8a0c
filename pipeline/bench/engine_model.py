"""The engine's own model of a deployment, asked with token ids as by upstream's inflight batcher client.

    model = EngineModel("127.0.0.1:8001", end_id=2, pad_id=2)
    answers = model.answers([(prompt, 64)])        greedy, with log probabilities where the engine returns them
    scores = other.scores(answers)                 log probabilities of the same tokens by another engine

An engine returns the logits of a prompt only if it was built for that (`return_context_logits`), and ours never does.
So an answer is scored token by token: each request has the prompt and the answer up to a token, asks for one more, and
takes its logits (`return_generation_logits`). The KV cache of the tokens in front is reused between them.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.client.tensors import read_signature
from pipeline.errors import ServerError
from pipeline.stages.evaluate.engine_answers import EngineAnswer
from pipeline.triton.deployment import TARGET_MODEL

__all__ = ["EngineModel"]

_TIMEOUT_S = 300.0
_STREAMS = 8  # at a time

Tensors = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Triton model with an engine; `url` is its gRPC address, host:port."""

    url: str
    end_id: int
    pad_id: int

    def answers(self, prompts: Sequence[tuple[Sequence[int], int]]) -> list[EngineAnswer]:
        """Ask for greedy answers.

        Raises:
            ServerError: A request was refused, or broke off.
        """
        with ThreadPoolExecutor(_STREAMS) as pool:
            futures = [pool.submit(self._answer, tuple(prompt), most) for prompt, most in prompts]
            return [future.result() for future in futures]

    def scores(self, answers: Sequence[EngineAnswer]) -> list[tuple[float, ...]]:
        """Score answers of this or another engine.

        Returns:
            For each answer, natural logarithms of the probability that this engine gives to each of its tokens.

        Raises:
            ServerError: A request was refused, such as by an engine that was built without generation logits.
        """
        with ThreadPoolExecutor(_STREAMS) as pool:
            futures = [
                [pool.submit(self._score, answer, index) for index in range(len(answer.tokens))]
                for answer in answers
            ]
            return [tuple(token.result() for token in tokens) for tokens in futures]

    def _answer(self, prompt: tuple[int, ...], most: int) -> EngineAnswer:
        tokens, log_probs = list[int](), list[float]()
        for response in self._ask(prompt, most, "return_log_probs", "output_log_probs"):
            length = int(response["sequence_length"].reshape(-1)[0])
            tokens += response["output_ids"].reshape(-1)[:length].tolist()
            returned = response.get("output_log_probs")
            log_probs += [] if returned is None else returned.reshape(-1)[:length].tolist()
        return EngineAnswer(prompt, tuple(tokens), tuple(log_probs) or None)

    def _score(self, answer: EngineAnswer, index: int) -> float:
        before, token = (*answer.prompt, *answer.tokens[:index]), answer.tokens[index]
        for response in self._ask(before, 1, "return_generation_logits", "generation_logits"):
            if "generation_logits" in response:
                logits = response["generation_logits"].reshape(-1).astype(np.float64)
                return float(logits[token] - np.logaddexp.reduce(logits))
        raise ServerError(f"{TARGET_MODEL} at {self.url} returns no logits of what it generates")

    def _ask(self, prompt: tuple[int, ...], most: int, flag: str, output: str) -> list[Tensors]:
        """Ask for tokens and one further output; return the tensors of each response that has tokens."""
        from tritonclient import grpc
        from tritonclient.utils import InferenceServerException, np_to_triton_dtype

        values: dict[str, Any] = {
            "input_ids": np.array([prompt], np.int32),
            "input_lengths": np.array([[len(prompt)]], np.int32),
            "request_output_len": np.array([[most]], np.int32),
            "end_id": np.array([[self.end_id]], np.int32),
            "pad_id": np.array([[self.pad_id]], np.int32),
            "runtime_top_k": np.array([[1]], np.int32),
            "streaming": np.array([[False]]),
            "exclude_input_in_output": np.array([[True]]),
            flag: np.array([[True]]),
        }
        arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        client = grpc.InferenceServerClient(self.url)
        responses, over = list[Tensors](), False
        try:
            config = read_signature(client.get_model_config(TARGET_MODEL, client_timeout=_TIMEOUT_S).config)
            tensors = []
            for name, value in values.items():
                if name in config.inputs:
                    tensor = grpc.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
                    tensor.set_data_from_numpy(value)
                    tensors.append(tensor)
            outputs = [name for name in ("output_ids", "sequence_length", output) if name in config.outputs]
            client.start_stream(lambda result, error: arrived.put((result, error)), stream_timeout=_TIMEOUT_S)
            client.async_stream_infer(
                TARGET_MODEL,
                tensors,
                outputs=[grpc.InferRequestedOutput(name) for name in outputs],
                enable_empty_final_response=True,
            )
            while not over:
                result, error = arrived.get(timeout=_TIMEOUT_S)
                over = error is not None
                if over:
                    raise ServerError(f"{TARGET_MODEL} refused a prompt of {len(prompt)} tokens: {error}")
                response = {name: array for name in outputs if (array := result.as_numpy(name)) is not None}
                responses += [response] if "output_ids" in response else []
                over = result.get_response().parameters["triton_final_response"].bool_param
        except queue.Empty:
            raise ServerError(f"{TARGET_MODEL} gave no answer within {_TIMEOUT_S:g} s") from None
        except InferenceServerException as error:
            raise ServerError(f"{TARGET_MODEL} does not answer: {error}") from None
        finally:
            # As `pipeline.serving.health` does: a request that is cancelled as it ends may stay in Triton 24.10.
            client.stop_stream(cancel_requests=not over)
            client.close()
        return responses
