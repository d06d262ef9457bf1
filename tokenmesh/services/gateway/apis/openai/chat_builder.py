"""A chat's body becomes a GenerationRequest."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from tokenmesh.services.gateway.apis.openai.inline_media import move_inline_media
from tokenmesh.services.gateway.apis.openai.prompt_embeds import embeds_parts, move_tensors
from tokenmesh.services.gateway.apis.openai.request import (
    ChatRequest,
    template_kwargs,
    thinking_switch,
)
from tokenmesh.services.gateway.apis.openai.request_builder import (
    RequestBuilder,
    chunk_options,
    head_of,
    shows_tokens_as_ids,
    text_options,
)
from tokenmesh.services.gateway.apis.openai.tools import (
    NO_TOOLS,
    ToolUse,
    add_calls,
    call_constraint,
    read_tools,
)
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.generation.parsing import ModelText, Parsing
from tokenmesh.services.gateway.core.generation.request import GenerationRequest
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.event_loop import off_loop
from tokenmesh.services.gateway.core.tenancy.tenant import Access
from tokenmesh.services.gateway.parsers.formats import FormatFamily, ToolFormat
from tokenmesh.services.gateway.parsers.parser import ParseContext, Parser
from tokenmesh.services.gateway.parsers.tools import json_calls
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.beat import ModelCard
from tokenmesh.shared.messages.media import EMBEDS_PART
from tokenmesh.shared.messages.tokenize import ChatPrompt

_FEW_TOOLS: Final = 8
"""The constraint of more tools is made in a thread."""


async def build_chat(
    builder: RequestBuilder, body: ChatRequest, context: RequestContext
) -> GenerationRequest:
    """Raises InvalidInput and other errors of the request."""
    settings, given = builder.settings, body.max_completion_tokens
    max_tokens = body.max_tokens if given is None else given
    tools = NO_TOOLS
    if body.tools or body.tool_choice is not None:
        tools = read_tools(body, settings)
        _clear_formats(body, tools, context)
    card, text = await builder.begin(body, context, max_tokens)
    if body.top_logprobs and not body.logprobs:
        raise InvalidInput("top_logprobs needs logprobs to be true", param="top_logprobs")
    sampling = builder.sampling(
        body,
        text,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=_num_prompt_logprobs(body),
        logprobs_field="top_logprobs",
    )
    structured = sampling.structured
    is_long = len(tools.schemas) > _FEW_TOOLS or context.has_large_body
    if structured is None and tools is not NO_TOOLS:
        structured = await off_loop(is_long, call_constraint, body, tools, text, context)
    elif structured is not None and tools.mode == "auto":
        structured = await off_loop(is_long, add_calls, structured, tools, text, context)
    sampling = msgspec.structs.replace(sampling, structured=structured)
    await builder.check(sampling.structured)
    parsing = _parsing(body, tools, text)
    if body.prediction is not None:
        _check_prediction(body, card, context)
    prompt = await _prompt(builder, body, tools, card, context.access)
    job = builder.job(body, card, prompt, sampling, max_tokens, context, parsing=parsing)
    role, echo = _opening(body)
    return GenerationRequest(
        head=head_of(body, context, card),
        jobs=(job,),
        text=text,
        options=text_options(body, shows_special=parsing.shows_special),
        chunks=chunk_options(body, bool(body.logprobs), settings),
        is_stream=bool(body.stream),
        shows_tokens_as_ids=shows_tokens_as_ids(body, settings),
        role=role,
        echo=echo,
        shows_prompt_logprobs=body.prompt_logprobs is not None,
        shows_prompt_text=bool(body.return_prompt_text),
        names_tool=tools.mode == "named",
    )


async def rebuild_chat(
    builder: RequestBuilder, first: GenerationRequest, body: ChatRequest, context: RequestContext
) -> GenerationRequest:
    """`first` with another conversation, without tools. Raises as `build_chat`."""
    (job,) = first.jobs
    if body.prediction is not None:
        _check_prediction(body, job.card, context)
    prompt = await _prompt(builder, body, NO_TOOLS, job.card, context.access)
    sampling = job.sampling
    if body.seed is None:
        sampling = msgspec.structs.replace(sampling, seed=builder.draw_seed())
    role, echo = _opening(body)
    job = replace(job, prompt=prompt, sampling=sampling)
    return replace(first, jobs=(job,), role=role, echo=echo)


async def chat_prompt(
    builder: RequestBuilder, body: ChatRequest, card: ModelCard, access: Access
) -> ChatPrompt:
    """The conversation for the tokenizer; large media move into the blob store."""
    return await _prompt(builder, body, read_tools(body, builder.settings), card, access)


async def _prompt(
    builder: RequestBuilder, body: ChatRequest, tools: ToolUse, card: ModelCard, access: Access
) -> ChatPrompt:
    if any(isinstance(message.get("content"), list) for message in body.messages):
        await move_inline_media(body.messages, builder.uploads, access)
        if tensors := embeds_parts(body.messages):
            _check_tensors(body)
            await move_tensors(tensors, card, builder.blobs, builder.settings)
    return ChatPrompt(
        messages_json=msgspec.json.encode(body.messages),
        tools_json=_json_or_none(tools.shown or None),
        documents_json=_json_or_none(body.documents),
        template_kwargs_json=_json_or_none(template_kwargs(body)),
        chat_template=body.chat_template,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        mm_processor_kwargs_json=_json_or_none(body.mm_processor_kwargs or None),
        merges_system=body.merges_system,
        prediction="" if body.prediction is None else body.prediction.text,
    )


def _check_prediction(body: ChatRequest, card: ModelCard, context: RequestContext) -> None:
    """Drop one that no draft can come from: the answer is the same without it."""
    if body.use_beam_search:
        reason = "a beam search has no drafts"
    elif not card.takes_predictions:
        reason = f"the model {card.name} computes one token of a stream at a time"
    else:
        return
    body.prediction = None
    if (warning := f"prediction ignored: {reason}") not in context.warnings:
        context.warnings.append(warning)


def _check_tensors(body: ChatRequest) -> None:
    """Raises InvalidInput for what tensors of a prompt cannot be shown as."""
    wanted = {
        "prompt_logprobs": body.prompt_logprobs is not None,
        "return_prompt_text": bool(body.return_prompt_text),
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise invalid(name, f"cannot be combined with parts of type {EMBEDS_PART}")


def _clear_formats(body: ChatRequest, tools: ToolUse, context: RequestContext) -> None:
    """Remove a format that a forced call replaces. Raises InvalidInput."""
    if not tools.is_forced:
        return
    if body.structured_outputs is not None:
        raise InvalidInput(
            "structured_outputs cannot be combined with a tool_choice that forces a call",
            param="structured_outputs",
        )
    if body.response_format is not None and body.response_format.type != "text":
        body.response_format = None
        context.warnings.append("response_format ignored: tool_choice forces a call")


def family_of(own: FormatFamily, tools: ToolUse) -> FormatFamily:
    """Return how the answer is written: in the model's own format, unless a call is forced."""
    if tools.mode == "none" or not tools.is_forced:
        return own if tools.schemas else FormatFamily(own.reasoning)
    make_ids = None if own.tools is None else own.tools.make_ids

    def make(context: ParseContext) -> Parser:
        make_id = None if make_ids is None else make_ids(context)
        if tools.mode == "named":
            return json_calls.named_call(tools.schemas[0].name, make_id)
        return json_calls.required_calls(make_id)

    return FormatFamily(own.reasoning, ToolFormat(make=make))


def _parsing(body: ChatRequest, tools: ToolUse, text: ModelText) -> Parsing:
    return Parsing(
        family=family_of(text.family, tools),
        vocabulary=text.vocabulary,
        tools=tools.schemas,
        thinking=thinking_switch(template_kwargs(body)),
        continues=body.continue_final_message,
        shows_reasoning=body.include_reasoning,
        shows_many_calls=body.parallel_tool_calls is not False,
    )


def _opening(body: ChatRequest) -> tuple[str, str]:
    """The answer's role, and the echoed text that it begins with."""
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
    """An echoed prompt has as many as the answer, as in vLLM."""
    if body.prompt_logprobs is None and body.echo and body.logprobs and not body.stream:
        return body.top_logprobs or 0
    return body.prompt_logprobs


def _json_or_none(value: Sequence[object] | dict[str, object] | None) -> bytes | None:
    return None if value is None else msgspec.json.encode(value)
