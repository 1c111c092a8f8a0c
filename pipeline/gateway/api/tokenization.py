"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer of a model, as vLLM's server offers it.

Programs that evaluate models count and cut prompts with it, without having the tokenizer themselves. A prompt is
tokenized as the engine gets it, unless the request says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.client import ClientError, Refused
from pipeline.gateway.api.bounds import Label, Messages, TokenId, Tools
from pipeline.gateway.api.parsing import OpenModel, hosted_tools, ignored_headers, parse_request, tolerate
from pipeline.gateway.api.prompts import read_messages
from pipeline.gateway.api.schema import ChatRequest, TemplateFields
from pipeline.gateway.context import SMALL_BODY_BYTES, EndpointFamily
from pipeline.gateway.errors import ApiError, from_client_error
from pipeline.gateway.records import RequestRecord
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.text_processes import OVER_BUDGET, OverBudget
from pipeline.gateway.web import ApiRoute


class TokenizerRequest(OpenModel):
    """Body of a request to a tokenizer. The model may be left out where there is one model."""

    model: Label | None = None


class TokenizeRequest(TokenizerRequest, TemplateFields):
    """Body of POST /tokenize: a text, or a chat."""

    refused: ClassVar = {"chat_template": (None,), "mm_processor_kwargs": (None,)}
    shapes: ClassVar = {name: ChatRequest.shapes[name] for name in ("messages", "tools")}

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    tools: Tools | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "prompt: must be given, or messages; one of both", param="prompt")
        return self


class DetokenizeRequest(TokenizerRequest):
    """Body of POST /detokenize."""

    tokens: list[TokenId]


_Body = TypeVar("_Body", bound=TokenizerRequest)


class TokenizationEndpoints(EndpointFamily):
    """Tokenizers of models."""

    @ApiRoute("POST", "/tokenize", "Tokenize a text or a chat.", request=TokenizeRequest)
    async def _tokenize(self, request: Request) -> Response:
        def tokenize(body: TokenizeRequest, model: ServedModel) -> dict[str, Any]:
            try:
                ids = token_ids(body, model)
            except OverBudget as error:
                field = "prompt" if body.messages is None else "messages"
                raise ApiError(400, f"{field}: {error}", param=field, code=OVER_BUDGET) from error
            strings = [model.tokenizer.token_name(id) for id in ids] if body.return_token_strs else None
            length = model.prompt_limit.max_tokens + model.max_output_tokens
            return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings}

        return await self._answer(request, TokenizeRequest, tokenize)

    @ApiRoute("POST", "/detokenize", "Decode token ids.", request=DetokenizeRequest)
    async def _detokenize(self, request: Request) -> Response:
        def detokenize(body: DetokenizeRequest, model: ServedModel) -> dict[str, Any]:
            if body.tokens:
                model.tokenizer.check_ids((min(body.tokens), max(body.tokens)), "tokens")
            return {"prompt": model.tokenizer.decode(body.tokens)}

        return await self._answer(request, DetokenizeRequest, detokenize)

    async def _answer(
        self, request: Request, kind: type[_Body], answer: Callable[[_Body, ServedModel], dict[str, Any]]
    ) -> Response:
        context = self.context
        tenant = await context.authenticate(request)
        record: RequestRecord = request.scope["record"]
        body = await context.receive_body(request)

        def work() -> dict[str, Any]:
            parsed = parse_request(kind, body)
            model = self._find_model(parsed.model)
            record.fields["model"] = model.name
            record.headers += ignored_headers(tolerate(parsed, model.template, strict=model.strict))
            return answer(parsed, model)

        try:
            if len(body) > SMALL_BODY_BYTES:
                return JSONResponse(await context.parsers.run(work, request, len(body), tenant))
            return JSONResponse(work())
        except ClientError as error:
            raise from_client_error(error) from error

    @ApiRoute("GET", "/tokenizer_info", "Describe a tokenizer.")
    async def _describe(self, request: Request) -> Response:
        await self.context.authenticate(request)
        template = self._find_model(request.query_params.get("model")).template
        tokens = {} if template is None else template.special_tokens
        sources = None if template is None else template.sources
        named = {name: tokens.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        # Who renders it without the special tokens gets them from the template itself.
        defined = "".join(f"{{% set {name} = {json.dumps(token)} %}}" for name, token in tokens.items())
        templates = {name: defined + source for name, source in (sources or {}).items()}
        chat_template = templates.get("default") if len(templates) == 1 else templates or None
        return JSONResponse(
            {"tokenizer_class": "PreTrainedTokenizerFast", **named, **tokens, "chat_template": chat_template}
        )

    def _find_model(self, name: str | None) -> ServedModel:
        """Find a model by its name, which may be left out where there is one model."""
        models = self.context.models
        if name is None and len(models) == 1:
            return next(iter(models.values()))
        if name is None:
            raise ApiError(400, f"model: must be one of {', '.join(models)}", param="model")
        return self.context.find_model(name)


def token_ids(request: TokenizeRequest, model: ServedModel) -> list[int]:
    """Tokenize the text or the chat of a request.

    Raises:
        ApiError: 400, for malformed messages.
        Refused: the chat template does not take the messages.
    """
    text = request.prompt
    if request.messages is not None:
        if model.template is None:
            raise Refused("This model has no chat template: give a prompt")
        messages = read_messages(request.messages)
        hosted = hosted_tools(request.tools or (), request.function_types)
        tools = [tool for index, tool in enumerate(request.tools or ()) if index not in hosted]
        text = model.render(messages, tools, request.template_variables)
    assert text is not None
    if request.add_special_tokens is None:
        return model.tokenizer.encode_prompt(text)
    return model.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)
