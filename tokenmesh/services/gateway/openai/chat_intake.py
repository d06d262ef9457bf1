"""ChatIntake: a chat body becomes an Ask."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from tokenmesh.services.gateway.context import RequestContext
from tokenmesh.services.gateway.generation.inline_media import move_inline_media
from tokenmesh.services.gateway.generation.parsing import Parsing
from tokenmesh.services.gateway.generation.request import GenerationRequest
from tokenmesh.services.gateway.http.off_loop import off_loop
from tokenmesh.services.gateway.mesh.vocabularies import ModelText
from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.openai.forced_calls import clear_formats, constraint_of, family_of
from tokenmesh.services.gateway.openai.request_builder import (
    RequestBuilder,
    chunk_options,
    head_of,
    shows_tokens_as_ids,
    text_options,
)
from tokenmesh.services.gateway.openai.strict_calls import strict_calls, wants_strict_calls
from tokenmesh.services.gateway.openai.thinking import template_kwargs, thinking_told
from tokenmesh.services.gateway.openai.tool_use import ToolUse, read_tools
from tokenmesh.services.gateway.tenancy.tenant import Access
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.structured import Structured
from tokenmesh.shared.messages.tokenize import ChatPrompt

_FEW_TOOLS: Final = 8


class ChatIntake:
    """The only place that reads the fields of a chat."""

    def __init__(self, desk: RequestBuilder) -> None:
        self._desk = desk

    async def ask(self, body: ChatRequest, exchange: RequestContext) -> GenerationRequest:
        """Raises InvalidInput and its kin."""
        asked = body.max_completion_tokens
        max_tokens = body.max_tokens if asked is None else asked
        tools = read_tools(body, self._desk.settings)
        clear_formats(body, tools, exchange)
        card, text = await self._desk.begin(body, exchange, max_tokens)
        if body.top_logprobs and not body.logprobs:
            raise InvalidInput("top_logprobs needs logprobs to be true", param="top_logprobs")
        sampling = self._desk.sampling(
            body,
            text,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=_num_prompt_logprobs(body),
        )
        if sampling.structured is None:
            is_long = len(tools.schemas) > _FEW_TOOLS
            structured = await off_loop(
                is_long, self._calls_constraint, body, tools, text, exchange
            )
            sampling = msgspec.structs.replace(sampling, structured=structured)
        await self._desk.check(sampling.structured)
        parsing = _parsing(body, tools, text)
        prompt = await self._prompt(body, tools, exchange.access)
        job = self._desk.job(body, card, prompt, sampling, max_tokens, exchange, parsing=parsing)
        role, echo = _opening(body)
        return GenerationRequest(
            head=head_of(body, exchange, card),
            jobs=(job,),
            text=text,
            options=text_options(body, shows_special=parsing.shows_special),
            chunks=chunk_options(body, bool(body.logprobs), self._desk.settings),
            is_stream=bool(body.stream),
            shows_tokens_as_ids=shows_tokens_as_ids(body, self._desk.settings),
            role=role,
            echo=echo,
            shows_prompt_logprobs=body.prompt_logprobs is not None,
            shows_prompt_text=bool(body.return_prompt_text),
            names_tool=tools.mode == "named",
        )

    async def again(
        self, first: GenerationRequest, body: ChatRequest, exchange: RequestContext
    ) -> GenerationRequest:
        """The same of another conversation. Raises InvalidInput and its kin."""
        (job,) = first.jobs
        prompt = await self._prompt(body, ToolUse(), exchange.access)
        sampling = job.sampling
        if body.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._desk.draw_seed())
        role, echo = _opening(body)
        job = replace(job, prompt=prompt, sampling=sampling)
        return replace(first, jobs=(job,), role=role, echo=echo)

    def _calls_constraint(
        self, body: ChatRequest, tools: ToolUse, text: ModelText, exchange: RequestContext
    ) -> Structured | None:
        """What binds the calls of the answer."""
        if tools.is_forced:
            return constraint_of(body, tools, self._desk.settings)
        if tools.mode == "auto" and text.family.tools is None:
            exchange.warnings.append("tools: the model has no tool_call_parser, calls stay text")
        elif wants_strict_calls(tools):
            structured = strict_calls(tools, text)
            if structured is None:
                exchange.warnings.append("tools: strict has no effect with this model's calls")
            return structured
        return None

    async def prompt(self, body: ChatRequest, access: Access) -> ChatPrompt:
        """The conversation as the tokenizer takes it, large media moved out of it."""
        return await self._prompt(body, read_tools(body, self._desk.settings), access)

    async def _prompt(self, body: ChatRequest, tools: ToolUse, access: Access) -> ChatPrompt:
        await move_inline_media(body.messages, self._desk.blobs, self._desk.settings, access)
        return ChatPrompt(
            messages_json=msgspec.json.encode(body.messages),
            tools_json=_json_or_none(tools.shown or None),
            documents_json=_json_or_none(body.documents),
            template_kwargs_json=_json_or_none(template_kwargs(body)),
            chat_template=body.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
        )


def _parsing(body: ChatRequest, tools: ToolUse, text: ModelText) -> Parsing:
    return Parsing(
        family=family_of(text.family, tools),
        vocabulary=text.vocabulary,
        tools=tools.schemas,
        thinking=thinking_told(template_kwargs(body)),
        continues=body.continue_final_message,
        shows_reasoning=body.include_reasoning,
        shows_many_calls=body.parallel_tool_calls is not False,
    )


def _opening(body: ChatRequest) -> tuple[str, str]:
    """The answer's role, and text that it begins with."""
    last = body.messages[-1]
    role = "assistant" if body.add_generation_prompt else last["role"]
    if not body.echo or last["role"] != role:
        return role, ""
    content = last.get("content") or ""
    if isinstance(content, str):
        return role, content
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    return role, "\n".join(text for text in texts if isinstance(text, str))


def _num_prompt_logprobs(body: ChatRequest) -> int | None:
    """Those of an echoed prompt go with those of the answer, as in vLLM."""
    if body.prompt_logprobs is None and body.echo and body.logprobs and not body.stream:
        return body.top_logprobs or 0
    return body.prompt_logprobs


def _json_or_none(value: Sequence[object] | dict[str, object] | None) -> bytes | None:
    return None if value is None else msgspec.json.encode(value)
