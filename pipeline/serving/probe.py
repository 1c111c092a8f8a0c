"""Check that a model really answers, by short generations.

Triton's own ServerReady (`is_ready`, which a start waits for) stays true when the process of a Python model is dead, so
it says too little. `HealthProbe` asks models of tokens, too, and waits for nothing; `pipeline.client` does neither.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from pipeline.client.answer import Answer
from pipeline.client.tensors import ModelSignature, read_signature
from pipeline.errors import ServerError

# Part of Triton's refusal of a request for which it has no place: it is busy, and works.
_NO_PLACE = "maximum queue size"


def generate(grpc_url: str, model: str, prompt: str, *, max_tokens: int, timeout_s: float) -> Answer:
    """Generate one greedy answer by a model that takes text: `ensemble`, `tensorrt_llm_bls`, or the LLM API's own.

    Raises:
        ServerError: There was no answer within the time, or an error came instead.
    """
    from pipeline.client import Client, ClientError, DeadlineExceeded, Retries, Timeouts

    timeouts, retries = Timeouts(timeout_s, timeout_s, timeout_s), Retries(attempts=1)
    try:
        with Client(grpc_url, model=model, timeouts=timeouts, retries=retries) as client:
            return client.generate(prompt, max_tokens=max_tokens, temperature=0)
    except DeadlineExceeded:
        raise ServerError(f"{model} gave no answer within {timeout_s:g} s") from None
    except ClientError as error:
        raise ServerError(f"{model} does not answer: {error}") from None


def is_ready(grpc_url: str, *, timeout_s: float) -> bool:
    """Ask a server whether it and all its models are ready; false if it does not answer in time."""
    from tritonclient import grpc
    from tritonclient.utils import InferenceServerException

    # A channel that shares its connection with others would wait as long as they do before it tries again.
    with grpc.InferenceServerClient(grpc_url, channel_args=[("grpc.use_local_subchannel_pool", 1)]) as client:
        try:
            return bool(client.is_server_ready(client_timeout=timeout_s))
        except InferenceServerException:
            return False


class HealthProbe:
    """Asks one model for one token, again and again, on one stream, and never waits for an answer.

    Takes models of text and models of tokens. Nothing is cancelled while the server works: cancelled as it ends,
    a request can stay in Triton 24.10 for good, and then its model is never unloaded.

    Attributes:
        outstanding_since: Time at which the probe under way was sent, by `time.monotonic`; None if none is.
        answered: Whether the last probe that ended was answered. A refusal for want of a place is an answer, too.
        failures: Probes that failed one after the other.
        error: Error of the last of them.
    """

    def __init__(self, grpc_url: str, model: str) -> None:
        self.model = model
        self.outstanding_since: float | None = None
        self.answered, self.failures, self.error = False, 0, ""
        self._url = grpc_url
        self._client: Any = None
        self._signature: ModelSignature | None = None
        self._connection = 0

    def ask(self, *, timeout_s: float = 2.0) -> None:
        """Send a probe. The model's configuration is asked for once, and waited for."""
        from tritonclient import grpc
        from tritonclient.utils import InferenceServerException

        self.outstanding_since = time.monotonic()
        try:
            if self._client is None:
                self._client = grpc.InferenceServerClient(self._url)
                if self._signature is None:
                    config = self._client.get_model_config(self.model, client_timeout=timeout_s).config
                    self._signature = read_signature(config)
                self._client.start_stream(partial(self._receive, self._connection))
            assert self._signature is not None, "it was read when the client was made"
            inputs = _inputs(self._signature, "Hello", 1)
            self._client.async_stream_infer(self.model, inputs, enable_empty_final_response=True)
        except InferenceServerException as error:
            # The next probe makes a connection of its own.
            self._disconnect()
            self._end(str(error))

    def ask_again(self) -> None:
        """Send a probe on a stream of its own in place of the stream that is under way, whose answer was lost."""
        self._disconnect()
        self.ask()

    def close(self) -> None:
        """Stop probing. To be called when the server is gone, or before it is stopped."""
        self._disconnect()
        self.outstanding_since = None

    def _receive(self, connection: int, result: Any, error: Any) -> None:
        """Take a response, in a thread of the client."""
        if connection != self._connection:
            return
        if error is not None:
            self._end("" if _NO_PLACE in str(error) else str(error))
            return
        parameters = result.get_response().parameters
        # A model that is not decoupled has one response, which does not say that it is the last.
        if "triton_final_response" not in parameters or parameters["triton_final_response"].bool_param:
            self._end("")

    def _end(self, error: str) -> None:
        self.answered = not error
        self.failures = self.failures + 1 if error else 0
        self.error = f"{self.model} does not answer: {error}" if error else ""
        self.outstanding_since = None

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        self._connection += 1
        if client is not None:
            client.stop_stream(cancel_requests=True)
            client.close()


# Role -> names of the input: in models of text and of tokens of TensorRT-LLM's backend, and in the `llmapi` model.
_NAMES = {
    "prompt": ("text_input",),
    "tokens": ("input_ids",),
    "length": ("input_lengths",),
    "max_tokens": ("max_tokens", "request_output_len", "sampling_param_max_tokens"),
    "stream": ("stream", "streaming"),
    "exclude_input": ("exclude_input_in_output", "sampling_param_exclude_input_from_output"),
}
_DATA_TYPES = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_}


def _inputs(facts: ModelSignature, prompt: str, max_tokens: int) -> list[Any]:
    """Make the inputs of a request; a model of tokens gets token 1, which every vocabulary has, for the prompt."""
    from tritonclient import grpc

    values = {
        "prompt": prompt.encode(),
        "tokens": 1,
        "length": 1,
        "max_tokens": max_tokens,
        "stream": facts.decoupled,
        "exclude_input": True,
    }
    inputs = []
    for role, value in values.items():
        name = facts.input_named(_NAMES[role])
        if name is None:
            continue
        datatype = facts.inputs[name].datatype
        array = np.array([[value]] if facts.batched else [value], _DATA_TYPES[datatype])
        tensor = grpc.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs
