"""Items of the prompts in `input` or `messages`."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from tokenmesh.services.gateway.openai.inline_media import move_inline_media
from tokenmesh.services.gateway.pooling.fields import InputFields
from tokenmesh.services.gateway.pooling.job import (
    Messages,
    check_number_of_media,
    media_options,
)
from tokenmesh.services.gateway.pooling.run import PoolRun
from tokenmesh.shared.errors import FieldPath, InvalidInput
from tokenmesh.shared.messages.pooling import PoolItem
from tokenmesh.shared.messages.tokenize import ChatPrompt


def check_input(body: InputFields) -> None:
    """Raises InvalidInput unless there is either `input` or `messages`."""
    if (body.input is None) == (body.messages is None):
        raise InvalidInput("send either input or messages", param="input")
    if body.input is not None and not body.input:
        raise InvalidInput("input is empty", param="input")


async def read_items(run: PoolRun, body: InputFields) -> list[PoolItem]:
    """One for each prompt. Raises InvalidInput and what calls of tokenizers raise."""
    given, job, tokenizer = body.input, run.job, run.services.tokenizer
    if given is None:
        return await _chats(run, body)
    special = body.add_special_tokens is not False

    def only(_kind: str, _index: int) -> FieldPath:
        return ("input",)

    if isinstance(given, str):
        return await tokenizer.texts(job, [given], only, add_special_tokens=special)
    if isinstance(given[0], int):
        return await tokenizer.ids(job, [given], only)

    def path_of(_kind: str, index: int) -> FieldPath:
        return "input", index

    if isinstance(given[0], str):
        return await tokenizer.texts(job, given, path_of, add_special_tokens=special)
    return await tokenizer.ids(job, given, path_of)


async def _chats(run: PoolRun, body: InputFields) -> list[PoolItem]:
    messages = cast("list[Any]", body.messages)
    is_batch = isinstance(messages[0], list)
    chats: list[Messages] = messages if is_batch else [messages]
    limit = run.services.settings.max_pool_inputs
    if len(chats) > limit:
        raise InvalidInput(f"messages holds {len(chats)} conversations, at most {limit}")
    prompts = []
    for index, chat in enumerate(chats):
        if not chat:
            raise InvalidInput(f"messages[{index}] is empty", param="messages")
        await move_inline_media(chat, run.services.uploads, run.context.access)
        prompts.append(_prompt(body, chat))
    check_number_of_media(chats, run.services.settings)
    paths: Sequence[FieldPath] = [
        ("messages", index) if is_batch else () for index in range(len(chats))
    ]
    return await run.services.tokenizer.chats(run.job, prompts, paths)


def _prompt(body: InputFields, messages: Messages) -> ChatPrompt:
    kwargs = body.chat_template_kwargs
    return ChatPrompt(
        messages_json=msgspec.json.encode(messages),
        template_kwargs_json=None if kwargs is None else msgspec.json.encode(kwargs),
        chat_template=body.chat_template,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=bool(body.add_special_tokens),
        mm_processor_kwargs_json=media_options(body),
    )
