"""The worker as a process: `python -m pipeline.gateway.dynamo --package PACKAGE --triton HOST:PORT`.

All other options, and the variables DYN_*, are those of Dynamo's own workers: discovery, namespace, parsers of tool
calls and of reasoning. The worker registers once an answer has come through all models.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Self

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.run import run
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.llm.exceptions import Cancelled as RequestCancelled
from dynamo.llm.exceptions import (
    CannotConnect,
    ConnectionTimeout,
    InvalidArgument,
    StreamIncomplete,
    Unknown,
)

from pipeline.client import (
    AsyncClient,
    Busy,
    Cancelled,
    ClientError,
    ConnectFailed,
    DeadlineExceeded,
    ModelNotFound,
    Refused,
    Retries,
    ServerLost,
    request_headers,
)
from pipeline.client.aio import AsyncStream
from pipeline.gateway.dynamo.card import make_model_card
from pipeline.gateway.dynamo.request import read_request, write_chunk
from pipeline.triton.deployment import Deployment

logger = logging.getLogger(__name__)

_POLL_S = 1.0
# The first that fits. Dynamo asks another worker where the connection was lost or the stream broke off.
_ERRORS: tuple[tuple[type[ClientError] | tuple[type[ClientError], ...], Any], ...] = (
    (Refused, InvalidArgument),
    ((ConnectFailed, ModelNotFound, Busy), CannotConnect),
    (DeadlineExceeded, ConnectionTimeout),
    (ServerLost, StreamIncomplete),
    (Cancelled, RequestCancelled),
    (ClientError, Unknown),
)


class TritonEngine(LLMEngine):  # type: ignore[misc]
    """One Triton server with a package, as Dynamo sees an engine."""

    def __init__(self, package: Path, url: str) -> None:
        self._url = url
        self._deployment = Deployment.load(package)
        self._client: AsyncClient | None = None
        self.card = make_model_card(package, self._deployment)
        self._streams: dict[str, AsyncStream] = {}

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        """Read the command line."""
        parser = argparse.ArgumentParser(prog="python -m pipeline.gateway.dynamo", description=__doc__)
        parser.add_argument("--package", type=Path, required=True, help="Folder that `pipeline build` made.")
        parser.add_argument("--triton", required=True, metavar="HOST:PORT", help="Triton's gRPC.")
        DynamoRuntimeArgGroup().add_arguments(parser)
        read = parser.parse_args(argv)
        package, url = read.package, read.triton
        runtime = DynamoRuntimeConfig.from_cli_args(read)
        runtime.validate()
        engine = cls(package, url)
        name = engine._deployment.name
        # Deployments share a namespace, and a component has one model.
        component, endpoint = re.sub(r"[^a-z0-9_-]", "-", name.lower()), "generate"
        if runtime.endpoint:
            runtime.namespace, component, endpoint = runtime.endpoint.removeprefix("dyn://").split(".")
        return engine, WorkerConfig.from_runtime_config(
            runtime,
            model_name=str(engine.card),
            served_model_name=name,
            component=component,
            endpoint=endpoint,
        )

    async def start(self, worker_id: int) -> EngineConfig:  # noqa: ARG002
        """Wait for Triton, ask the model once, and describe it."""
        self._client = AsyncClient(
            self._url, model=self._deployment.entry_model, retries=Retries(attempts=1), spread="least-load"
        )
        await self._wait_ready(self._client)
        deployment, limits = self._deployment, self._deployment.limits
        signature = await self._client.model()
        return EngineConfig(
            model=str(self.card),
            served_model_name=deployment.name,
            llm=LlmRegistration(
                context_length=limits.max_input_tokens + limits.max_output_tokens,
                kv_cache_block_size=signature.tokens_per_block,
                max_num_seqs=limits.max_concurrency,
            ),
        )

    async def _wait_ready(self, client: AsyncClient) -> None:
        while True:
            try:
                await client.generate([self._deployment.end_id], max_tokens=1, token_ids=True)
                return
            except (ConnectFailed, ModelNotFound, Busy) as error:
                logger.info("waiting for Triton: %s", error)
            await asyncio.sleep(_POLL_S)

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Answer one request, which has the prompt's token ids."""
        assert self._client is not None, "it was started"
        prompt: Sequence[int] = request["token_ids"]
        request_headers.set(tuple((context.trace_headers() or {}).items()))
        try:
            sampling = read_request(request, self._deployment)
            stream = self._client.stream(prompt, request_id=context.id(), **sampling)
            self._streams[context.id()] = stream
            async with stream:
                async for chunk in stream:
                    yield write_chunk(chunk, stream.stats, len(prompt))
        except ClientError as error:
            raise next(dynamo_type for error_type, dynamo_type in _ERRORS if isinstance(error, error_type))(
                str(error)
            ) from error
        finally:
            self._streams.pop(context.id(), None)

    async def abort(self, context: Any) -> None:
        """Stop a request whose client is gone."""
        if stream := self._streams.get(context.id()):
            stream.cancel()

    async def health_check_payload(self) -> dict[str, Any]:
        """Return a request of one token, which passes through all models."""
        payload: dict[str, Any] = build_health_check_payload(self._deployment.end_id)
        return payload

    async def cleanup(self) -> None:
        """Close the connection. Triton goes on."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None


if __name__ == "__main__":
    run(TritonEngine)
