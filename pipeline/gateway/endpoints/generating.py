"""The way of a request to a model, from authentication to the answer, which is the same for every API.

A request is parsed and checked here, becomes a `ModelAnswer`, and is answered by `pipeline.gateway.http_responses`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from pipeline.client import ClientError, PromptTooLong
from pipeline.gateway.context import SMALL_BODY_BYTES
from pipeline.gateway.endpoints.endpoint import EndpointFamily
from pipeline.gateway.errors import ApiError, from_client_error
from pipeline.gateway.http_responses import EventStream, ModelAnswer, RecordedAnswer, json_response
from pipeline.gateway.limits import Tenant
from pipeline.gateway.parsing import parse_request
from pipeline.gateway.records import RequestRecord
from pipeline.gateway.schema import ModelRequest
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.text_processes import OVER_BUDGET, OverBudget
from pipeline.gateway.tolerance import clamped_headers, ignored_headers, tolerate

_Body = TypeVar("_Body", bound=ModelRequest)
_Answer = TypeVar("_Answer", bound=ModelAnswer)


class Asker(NamedTuple):
    """What an answer is made of besides the body of the request."""

    model: ServedModel
    tenant: Tenant
    record: RequestRecord


class GeneratingEndpoints(EndpointFamily):
    """Endpoints whose requests a model answers."""

    def too_long(self, error: PromptTooLong) -> ApiError:
        """Return the answer to a request whose prompt is too long, in the words of the API."""
        return from_client_error(error)

    async def generate(
        self,
        request: Request,
        kind: type[_Body],
        make: Callable[[_Body, Asker], ModelAnswer],
        *,
        prompt_field: str,
        recall: Callable[[_Body, Tenant], Awaitable[int]] | None = None,
    ) -> Response:
        """Answer a request, whole or streamed.

        Args:
            request: of the client.
            kind: of its body.
            make: checks a body and makes the answer.
            prompt_field: field of the body that holds the prompt.
            recall: reads what a body refers to, before `make` is called, and returns its bytes; None: bodies refer to
                nothing.

        Raises:
            ApiError: the request is refused, or fails.
        """
        answer = await self.check(request, kind, make, prompt_field=prompt_field, recall=recall)
        recorded = RecordedAnswer(answer, self.context.metrics, self.context.hits, request.scope["record"])
        return EventStream(recorded) if answer.streams else await json_response(request, recorded)

    async def check(
        self,
        request: Request,
        kind: type[_Body],
        make: Callable[[_Body, Asker], _Answer],
        *,
        prompt_field: str,
        recall: Callable[[_Body, Tenant], Awaitable[int]] | None = None,
    ) -> _Answer:
        """Authenticate, parse and check a request, its prompt counted in tokens. Nothing is generated yet.

        Args:
            request: of the client.
            kind: of its body.
            make: checks a body and makes the answer; in a thread, if that may take long.
            prompt_field: field of the body that holds the prompt.
            recall: reads what a body refers to, before `make` is called, and returns its bytes; None: bodies refer to
                nothing.

        Raises:
            ApiError: the request is refused.
        """
        context = self.context
        tenant = await context.authenticate(request)
        record: RequestRecord = request.scope["record"]
        body = await context.receive_body(request)

        def parse() -> _Body:
            parsed = parse_request(kind, body)
            record.fields["model"] = context.find_model(parsed.model).name
            return parsed

        def begin(parsed: _Body) -> _Answer:
            model = context.find_model(parsed.model)
            record.headers += ignored_headers(tolerate(parsed, model.template, strict=model.strict))
            answer = make(parsed, Asker(model, tenant, record))
            record.headers += clamped_headers(answer.generation.clamped_to)
            return answer

        try:
            size = len(body)
            if size <= SMALL_BODY_BYTES:
                parsed = parse()
            elif recall is None:
                return await context.parsers.run(lambda: begin(parse()), request, size, tenant)
            else:
                parsed = await context.parsers.run(parse, request, size, tenant)
            if recall is not None:
                size += await recall(parsed, tenant)
            if size > SMALL_BODY_BYTES or parsed.has_schemas:
                return await context.parsers.run(lambda: begin(parsed), request, size, tenant)
            return begin(parsed)
        except OverBudget as error:
            text = f"{prompt_field}: {error}"
            raise ApiError(400, text, param=prompt_field, code=OVER_BUDGET) from error
        except PromptTooLong as error:
            await tenant.charge_tokens(error.tokens)
            answered = self.too_long(error)
            answered.param = prompt_field
            raise answered from error
        except ClientError as error:
            raise from_client_error(error) from error
