"""ChatIntake: a chat body becomes an Ask."""

from collections.abc import Sequence

import msgspec

from tokenmesh.services.gateway.ask import Ask
from tokenmesh.services.gateway.exchange import Exchange
from tokenmesh.services.gateway.inline_media import move_inline_media
from tokenmesh.services.gateway.intake.desk import Desk, chunk_options, text_options
from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.openai.head import Head
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.messages.tokenize import ChatPrompt


class ChatIntake:
    """The only place that reads the fields of a chat."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def ask(self, body: ChatRequest, exchange: Exchange) -> Ask:
        """Raises InvalidInput and its kin."""
        asked = body.max_completion_tokens
        max_tokens = body.max_tokens if asked is None else asked
        card, text = await self._desk.begin(body, exchange, max_tokens)
        if body.top_logprobs and not body.logprobs:
            raise InvalidInput("top_logprobs needs logprobs to be true", param="top_logprobs")
        sampling = self._desk.sampling(
            body,
            text,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )
        prompt = await self.prompt(body)
        job = self._desk.job(body, card, prompt, sampling, max_tokens, exchange.request_id)
        last = body.messages[-1]
        role = "assistant" if body.add_generation_prompt else last["role"]
        content = last.get("content")
        is_continued = body.echo and last["role"] == role and isinstance(content, str)
        return Ask(
            head=Head(exchange.request_id, int(now_s()), card.name),
            jobs=(job,),
            text=text,
            options=text_options(body),
            chunks=chunk_options(body, bool(body.logprobs)),
            is_stream=bool(body.stream),
            shows_tokens_as_ids=bool(body.return_tokens_as_token_ids),
            role=role,
            echo=str(content) if is_continued else "",
            shows_prompt_logprobs=body.prompt_logprobs is not None,
        )

    async def prompt(self, body: ChatRequest) -> ChatPrompt:
        """The conversation as the tokenizer takes it, large media moved out of it."""
        await move_inline_media(body.messages, self._desk.blobs, self._desk.settings)
        # tool_choice none: the model is not to know of the tools at all.
        tools = None if body.tool_choice == "none" else body.tools
        return ChatPrompt(
            messages_json=msgspec.json.encode(body.messages),
            tools_json=_json_or_none(tools),
            documents_json=_json_or_none(body.documents),
            template_kwargs_json=_json_or_none(body.chat_template_kwargs),
            chat_template=body.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
        )


def _json_or_none(value: Sequence[object] | dict[str, object] | None) -> bytes | None:
    return None if value is None else msgspec.json.encode(value)
