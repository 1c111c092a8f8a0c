"""The prompts of a request, as the engine gets them: texts, token ids, rendered chats, and texts with a gap to fill.

Chat templates want one text a message, and the arguments of a call as an object. Pictures and sound are refused.
Whatever this gateway answers is taken back as it was: also nothing, a refusal, and a call whose arguments were cut off.

A prompt of token ids goes to the engine as it is: no token is put in front of it. A text with a suffix becomes what
models for code were trained on (fill in the middle), where the vocabulary has the special tokens for it; of the ways
to write it, those are known in which nothing but special tokens stands between the parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic_core import from_json

from pipeline.client import PromptTooLong
from pipeline.gateway.api.bounds import MAX_DEPTH
from pipeline.gateway.api.parsing import check_json, raise_faults, unsupported
from pipeline.gateway.api.schema import ChatRequest, CompletionRequest, GenerationRequest
from pipeline.gateway.api.tools.choice import RequestTools
from pipeline.gateway.api.tools.dialects import MESSAGE
from pipeline.gateway.api.tools.history import reasoning_variables
from pipeline.gateway.errors import ApiError
from pipeline.gateway.served_model import ServedModel

_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn messages as OpenAI's clients send them into what chat templates take.

    Raises:
        ApiError: 400, with the first faults.

    >>> read_messages([{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}])
    [{'role': 'system', 'content': 'Be brief.'}]
    """
    faults: list[str] = []
    read = [_read_message(message, f"messages.{index}", faults) for index, message in enumerate(messages)]
    raise_faults(faults, "messages")
    return read


def _read_message(message: Mapping[str, Any], where: str, faults: list[str]) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        faults.append(f"{where}.role: must be one of {', '.join(_ROLES)}")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        faults.append(f"{where}.tool_call_id: is missing")
    calls = message.get("tool_calls") if role == "assistant" else None
    read = {key: value for key, value in message.items() if value is not None}
    read["role"] = "system" if role == "developer" else role
    # Calls belong to answers, and their ids to results; what others have by these names has not been read.
    for name, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if role != owner:
            read.pop(name, None)
    if role == "assistant" and isinstance(refusal := read.pop("refusal", None), str):
        read.setdefault("content", refusal)
    if read.get("content") is None:
        # An assistant may have said nothing.
        if role != "assistant":
            faults.append(f"{where}.content: is missing")
        read["content"] = ""
    else:
        read["content"] = _read_content(read["content"], f"{where}.content", faults)
    if calls and not isinstance(calls, list):
        faults.append(f"{where}.tool_calls: must be a list of calls")
    elif calls:
        read["tool_calls"] = [
            _read_call(call, f"{where}.tool_calls.{index}", faults) for index, call in enumerate(calls)
        ]
    return read


def _read_content(content: Any, where: str, faults: list[str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        faults.append(f"{where}: must be a text or a list of parts")
        return ""
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "refusal") and isinstance(part.get(kind), str):
            texts.append(part[kind])
        else:
            faults.append(f'{where}.{index}: this model takes text only: {{"type": "text", "text": …}}')
    return "".join(texts)


def _read_call(call: Any, where: str, faults: list[str]) -> Any:
    """A call with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        faults.append(f"{where}.function.name: is missing")
        return call
    if not isinstance(call.get("id", ""), str):
        faults.append(f"{where}.id: must be a text")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = read_arguments(arguments)
    elif not isinstance(arguments, dict):
        faults.append(f"{where}.function.arguments: must be a JSON object, as text")
    return {**call, "function": {**function, "arguments": arguments}}


def read_arguments(text: str) -> dict[str, Any]:
    """Read the arguments of a call, of which a limit of tokens may have cut off the end.

    Returns:
        The object, as far as it came; an empty one for what is no JSON object, or nested too deep.

    >>> read_arguments('{"city": "Par'), read_arguments("")
    ({'city': 'Par'}, {})
    """
    read: Any = None
    with suppress(ApiError, ValueError):
        # With some levels left for what stands around them in a request.
        check_json(text.encode(errors="replace"), max_depth=MAX_DEPTH - 16)
        try:
            read = json.loads(text)
        except ValueError:
            read = from_json(text, allow_partial="trailing-strings")
    return read if isinstance(read, dict) else {}


TokenIds = Sequence[int]
# A text, its token ids, or the messages of a chat.
Content = str | TokenIds | Sequence[dict[str, Any]]

# Before the text, before the suffix, and where the answer begins.
_FILL_IN_THE_MIDDLE = (
    # Qwen2.5-Coder, CodeGemma
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, Granite Code
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # DeepSeek-Coder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """One prompt of a request.

    Attributes:
        content: identity of the prompt in the response cache.
        sent: text by the chat template, or token ids.
        tokens: number of tokens.
        variables: variables of the chat template besides messages and tools.
    """

    content: Content
    sent: str | TokenIds
    tokens: int
    variables: dict[str, Any] = field(default_factory=dict)

    def text(self, model: ServedModel) -> str:
        """Return the prompt as text; token ids are decoded, special tokens too."""
        return self.sent if isinstance(self.sent, str) else model.tokenizer.decode(self.sent)


def render_prompts(
    request: GenerationRequest,
    contents: Sequence[Content],
    model: ServedModel,
    tools: RequestTools,
    *,
    guided: bool = False,
) -> list[RenderedPrompt]:
    """Render the prompts of a request for a model, and count their tokens.

    Args:
        guided: whether answers are held to a form from their first token on: the model is told not to reason.

    Raises:
        ApiError: 400; a token id is unknown, or the model cannot fill gaps.
        PromptTooLong: a prompt has more tokens than the engine takes.
        ClientError: the template does not take the messages.
    """
    if isinstance(request, CompletionRequest):
        contents = [_completion_content(request, content, model) for content in contents]
    variables: dict[str, Any] = {}
    if isinstance(request, ChatRequest):
        if model.template is not None:
            thinks = False if guided else request.thinks
            variables |= reasoning_variables(request.reasoning_effort, thinks, model.template)
        variables |= request.template_variables
    prompts = []
    for content in contents:
        if not isinstance(content, str) and isinstance(content[0], int):
            ids = cast(TokenIds, content)
            prompts.append(_token_prompt(ids, model))
        else:
            text_or_messages = cast(str | Sequence[dict[str, Any]], content)
            sent, tokens = model.render_prompt(text_or_messages, tools.tools, variables)
            if guided and isinstance(request, ChatRequest) and (begun := _begun(sent, model, tools)):
                sent += begun
                tokens = model.prompt_limit.check(sent)
            prompts.append(RenderedPrompt(content, sent, tokens, variables))
    return prompts


def _begun(prompt: str, model: ServedModel, tools: RequestTools) -> str:
    """Text between a prompt and an answer that is held to a form: it ends the reasoning, and begins a call."""
    format = model.answer_format
    if format.channels:
        return tools.begun or ("" if prompt.endswith(MESSAGE) else f"<|channel|>final{MESSAGE}")
    opened = format.reasoning is not None and prompt.rstrip().endswith(format.reasoning.open)
    return f"{format.reasoning.close}\n\n{tools.begun}" if opened and format.reasoning else tools.begun


def echoed_text(request: GenerationRequest, prompt: RenderedPrompt, model: ServedModel) -> str:
    """Return what an answer begins with if the request wants the prompt echoed; else "".

    It is the prompt of a completion; of a chat, as vLLM does it, the last message if it is the assistant's.
    """
    if isinstance(request, CompletionRequest):
        return prompt.text(model) if request.echo else ""
    if isinstance(request, ChatRequest) and request.echo and not isinstance(prompt.content, str):
        last = prompt.content[-1]
        if isinstance(last, dict) and last["role"] == "assistant":
            return str(last["content"])
    return ""


def _completion_content(request: CompletionRequest, content: Content, model: ServedModel) -> Content:
    if not isinstance(content, str):
        return content
    if request.suffix:
        content = _fill_in_the_middle(content, request.suffix, model)
    if request.add_special_tokens is False:
        ids = model.tokenizer.encode(content, add_special_tokens=False)
        if not ids:
            raise ApiError(400, "prompt: has no tokens without add_special_tokens", param="prompt")
        return ids
    return content


def _fill_in_the_middle(text: str, suffix: str, model: ServedModel) -> str:
    for tokens in _FILL_IN_THE_MIDDLE:
        if all(model.tokenizer.has_token(token) for token in tokens):
            before, between, after = tokens
            return f"{before}{text}{between}{suffix}{after}"
    raise unsupported("suffix", "suffix: this model's vocabulary has no tokens for filling in the middle")


def _token_prompt(ids: TokenIds, model: ServedModel) -> RenderedPrompt:
    most = model.prompt_limit.max_tokens
    if len(ids) > most:
        raise PromptTooLong(len(ids), most)
    model.tokenizer.check_ids((min(ids), max(ids)), "prompt")
    return RenderedPrompt(ids, ids, len(ids))
