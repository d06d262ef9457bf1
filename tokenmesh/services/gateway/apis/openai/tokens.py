"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from tokenmesh.services.gateway.apis.openai.chat_builder import chat_prompt
from tokenmesh.services.gateway.apis.openai.inline_media import move_inline_media
from tokenmesh.services.gateway.apis.openai.prompt_embeds import embeds_parts, move_tensors
from tokenmesh.services.gateway.apis.openai.request import (
    ChatRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.apis.openai.shapes import DetokenizeResult, TokenizeResult
from tokenmesh.services.gateway.core.context import RequestContext, context_of
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.body import body_schema, read_json
from tokenmesh.services.gateway.core.http.errors import invalid
from tokenmesh.services.gateway.core.http.sse import json_response
from tokenmesh.shared import subjects
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages import (
    Detokenize,
    Detokenized,
    ReadTokenizerConfig,
    Tokenize,
    TokenizerConfigRead,
)
from tokenmesh.shared.messages.tokenize import ChatPrompt, TextPrompt
from tokenmesh.shared.tokens import count_ids, pack_ids, unpack_ids


def tokenize_router(core: Core) -> APIRouter:
    """The routes to and from token ids."""
    router = APIRouter(tags=["tokens"])
    timeout_s = core.settings.tokenize_timeout_s

    @router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The ids of a prompt, or of a conversation as its template writes it."""
        body = await read_json(request, TokenizeRequest, core.settings)
        card = await core.mesh.catalog.find_soon(body.model)
        context = context_of(request.scope)
        if body.messages is not None:
            await move_inline_media(body.messages, core.uploads, context.access)
            tensors = embeds_parts(body.messages)
            await move_tensors(tensors, card, core.uploads.blobs, core.settings)
        message = Tokenize(
            request_id=context.request_id,
            model=card.name,
            tenant=context.access.tenant.name,
            prompt=_prompt(body),
            context_tokens=card.max_model_len,
            return_token_strs=bool(body.return_token_strs),
        )
        answer = await core.mesh.calls.tokenize(message, now_s() + timeout_s)
        ids = unpack_ids(answer.token_ids)
        return json_response(TokenizeResult(len(ids), card.max_model_len, ids, answer.token_strs))

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of ids, special tokens included."""
        body = await read_json(request, DetokenizeRequest, core.settings)
        card = await core.mesh.catalog.find_soon(body.model)
        context = context_of(request.scope)
        if len(body.tokens) > card.max_model_len:
            raise invalid(
                "tokens", f"holds {len(body.tokens)} ids, the model takes {card.max_model_len}"
            )
        message = Detokenize(
            request_id=context.request_id,
            model=card.name,
            token_ids=pack_ids(body.tokens),
            tenant=context.access.tenant.name,
        )
        subject, deadline_s = subjects.tokenize(card.name), now_s() + timeout_s
        answer = await core.mesh.calls.request(
            subject, message, Detokenized, timeout_s=timeout_s, deadline_s=deadline_s
        )
        return json_response(DetokenizeResult(answer.text))

    return router


def tokenizer_info_router(core: Core) -> APIRouter:
    """Only mounted where `gateway.tokenizer_info` is on, since templates may be private."""
    router = APIRouter(tags=["tokens"])
    timeout_s = core.settings.tokenize_timeout_s

    @router.get("/tokenizer_info")
    async def tokenizer_info(
        model: Annotated[str | None, Query(description="Needed where there are several.")] = None,
    ) -> Response:
        """The tokenizer's configuration and the chat template in force."""
        card = await core.mesh.catalog.find_soon(model)
        answer = await core.mesh.calls.request(
            subjects.tokenize(card.name),
            ReadTokenizerConfig(model=card.name),
            TokenizerConfigRead,
            timeout_s=timeout_s,
            deadline_s=now_s() + timeout_s,
        )
        return Response(answer.config_json, media_type="application/json")

    return router


def _prompt(body: TokenizeRequest) -> TextPrompt | ChatPrompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidInput("send either prompt or messages", param="prompt")
    if body.prompt is not None:
        special = body.add_special_tokens
        return TextPrompt(text=body.prompt, add_special_tokens=special is not False)
    kwargs = body.chat_template_kwargs
    return ChatPrompt(
        messages_json=msgspec.json.encode(body.messages),
        tools_json=None if body.tools is None else msgspec.json.encode(body.tools),
        template_kwargs_json=None if kwargs is None else msgspec.json.encode(kwargs),
        chat_template=body.chat_template,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=bool(body.add_special_tokens),
    )


async def count_prompt_tokens(
    core: Core, builder: RequestBuilder, body: ChatRequest, context: RequestContext
) -> int:
    """Tokens of a chat's prompt, with system prompt, tools and images.

    Raises InvalidInput and the errors of the tokenizer.
    """
    card = await core.mesh.catalog.find_soon(body.model, context.request_id)
    context.model = card.requested_name
    request = Tokenize(
        request_id=context.request_id,
        model=card.name,
        tenant=context.access.tenant.name,
        context_tokens=card.max_model_len,
        prompt=await chat_prompt(builder, body, card, context.access),
    )
    deadline_s = now_s() + core.settings.tokenize_timeout_s
    return count_ids((await core.mesh.calls.tokenize(request, deadline_s)).token_ids)
