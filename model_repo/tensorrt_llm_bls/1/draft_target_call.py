"""An answer from a draft and its target, with the face of a single call of the engine (`engine_call`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from draft_calls import EnginePair
from draft_target import DraftTarget, VerifiedTokens
from engine_call import LOG_PROBS, asked_for, engine_id, engine_inputs
from engine_client import EngineClient
from shared.prompts import Prompts
from shared.stop_words import unpack
from shared.tensors import Array, read, read_flag
from speculation import DraftSettings


class DraftTargetCall:
    """A request of one row and one beam that is under way.

    Streaming, a response follows each verification. Otherwise there is one. The last has what the request wants to know
    of the whole answer.
    """

    def __init__(
        self,
        target: EngineClient,
        speculation: DraftSettings,
        request: Any,
        prompts: Prompts,
        *,
        draft_tokens: int,
        prompt_comes_back: bool,
        prior_output_len: int = 0,
    ) -> None:
        self.asked_for = asked_for(request)
        self._log_probs = bool(set(LOG_PROBS) & set(self.asked_for))
        self._streams = read_flag(request, "stream")
        self._prompt = prompts.input_ids[0, : int(prompts.input_lengths[0, 0])].tolist()
        self._prompt_comes_back = prompt_comes_back
        inputs = engine_inputs(request, prompts)
        self._pair = EnginePair(
            target,
            speculation,
            inputs,
            request_id=engine_id(request),
            streams=self._streams,
            log_probs=self._log_probs,
            use_logits=read_flag(request, "use_draft_logits"),
        )
        minimum = inputs.get("min_tokens")
        max_tokens = read(request, "max_tokens")
        assert max_tokens is not None, "refused before"
        self._loop = DraftTarget(
            self._pair,
            self._prompt,
            max_tokens=int(max_tokens.flat[0]),
            draft_tokens=draft_tokens,
            adapts=read(request, "num_draft_tokens") is None,  # a number that is asked for is kept
            min_tokens=0 if minimum is None else int(minimum.flat[0]),
            stop_words=unpack(prompts.stop_words[0]),
            prior=prior_output_len,
        )

    def responses(self) -> Iterator[dict[str, Array]]:
        """Each response as name -> array, as the engine's are.

        Raises:
            RequestRefused: The target refused the request, or failed; the text is the target's.
        """
        if self._streams:
            for step in self._loop.steps():
                yield self._response(step, step.tokens)
            return
        steps = list(self._loop.steps())
        tokens = tuple(token for step in steps for token in step.tokens)
        log_probs = tuple(value for step in steps for value in step.log_probs)
        prompt = self._prompt if self._prompt_comes_back else ()
        yield self._response(
            VerifiedTokens(tokens, log_probs, steps[-1].cum_log_prob, last=True), (*prompt, *tokens)
        )

    def stop(self) -> None:
        """End it early: both engines free what they hold, and `responses` ends soon after."""
        self._loop.stop()
        self._pair.stop()

    def _response(self, step: VerifiedTokens, tokens: tuple[int, ...]) -> dict[str, Array]:
        response: dict[str, Array] = {
            "output_ids": np.array([[tokens]], np.int32).reshape(1, 1, -1),
            "sequence_length": np.array([[len(tokens)]], np.int32),
        }
        if self._log_probs:
            response["cum_log_probs"] = np.array([[step.cum_log_prob]], np.float32)
            response["output_log_probs"] = np.array([[step.log_probs]], np.float32).reshape(1, 1, -1)
        if step.last:
            loop = self._loop
            metrics = self._pair.metrics.outputs(
                proposed=loop.proposed, accepted=loop.accepted, inputs=len(self._prompt), made=loop.made_here
            )
            response |= {name: array for name, array in metrics.items() if name in self.asked_for}
        return response
