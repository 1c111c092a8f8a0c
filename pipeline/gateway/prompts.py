"""The prompts of a request, as the engine gets them: texts, token ids, rendered chats, and texts with a gap to fill.

A prompt of token ids goes to the engine as it is: no token is put in front of it. A text with a suffix becomes what
models for code were trained on (fill in the middle), where the vocabulary has the special tokens for it; of the ways
to write it, those are known in which nothing but special tokens stands between the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pipeline.client import PromptTooLong
from pipeline.gateway.errors import ApiError
from pipeline.gateway.schema import ChatRequest, CompletionRequest, GenerationRequest
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.tools.choice import RequestTools

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
        content: what the response cache knows the prompt by.
        sent: text by the chat template, or token ids.
        tokens: number of tokens.
        variables: what the chat template was given besides messages and tools.
    """

    content: Content
    sent: str | TokenIds
    tokens: int
    variables: dict[str, Any] = field(default_factory=dict)

    def text(self, model: ServedModel) -> str:
        """Return the prompt as text; token ids are decoded, special tokens too.

        Args:
            model: whose tokenizer decodes.
        """
        return self.sent if isinstance(self.sent, str) else model.tokenizer.decode(self.sent)


def render_prompts(
    request: GenerationRequest, contents: Sequence[Content], model: ServedModel, tools: RequestTools
) -> list[RenderedPrompt]:
    """Render the prompts of a request for a model, and count their tokens.

    Args:
        request: with fields for the chat template, or a suffix.
        contents: of each prompt.
        model: that gets the prompts.
        tools: of the request.

    Raises:
        ApiError: 400; a token id is unknown, or the model cannot fill gaps.
        PromptTooLong: a prompt has more tokens than the engine takes.
        ClientError: the template does not take the messages.
    """
    if isinstance(request, CompletionRequest):
        contents = [_completion_content(request, content, model) for content in contents]
    variables = request.template_variables if isinstance(request, ChatRequest) else {}
    prompts = []
    for content in contents:
        if not isinstance(content, str) and isinstance(content[0], int):
            ids = cast(TokenIds, content)
            prompts.append(_token_prompt(ids, model))
        else:
            rest = cast(str | Sequence[dict[str, Any]], content)
            sent, tokens = model.render_prompt(rest, tools.tools, variables)
            prompts.append(RenderedPrompt(content, sent, tokens, variables))
    return prompts


def echoed_text(request: GenerationRequest, prompt: RenderedPrompt, model: ServedModel) -> str:
    """Return what an answer begins with if the request wants the prompt echoed.

    Args:
        request: of the client.
        prompt: of the answer.
        model: that generates the answer.

    Returns:
        The prompt of a completion; of a chat, as vLLM does it, the last message if it is the assistant's; else "".
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
    reason = "suffix: this model's vocabulary has no tokens for filling in the middle"
    raise ApiError(400, reason, param="suffix", code="unsupported_parameter")


def _token_prompt(ids: TokenIds, model: ServedModel) -> RenderedPrompt:
    most = model.prompt_limit.max_tokens
    if len(ids) > most:
        raise PromptTooLong(len(ids), most)
    model.tokenizer.check_ids((min(ids), max(ids)), "prompt")
    return RenderedPrompt(ids, ids, len(ids))
