"""Items of the prompts in `input` or `messages`, and of texts and images that are compared.

A Side holds the texts and images of one field, such as the documents of a reranking.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from tokenmesh.services.gateway.apis.openai.inline_media import move_inline_media
from tokenmesh.services.gateway.apis.openai.prompt_embeds import embeds_parts, move_tensors
from tokenmesh.services.gateway.apis.pooling.fields import InputFields
from tokenmesh.services.gateway.apis.pooling.job_builder import (
    Messages,
    check_number_of_media,
    media_options,
)
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid
from tokenmesh.services.gateway.core.pooling.prompts import located
from tokenmesh.services.gateway.core.pooling.run import PoolRun
from tokenmesh.shared.errors import FieldPath, InvalidInput, field_name
from tokenmesh.shared.messages.pooling import PoolItem
from tokenmesh.shared.messages.tokenize import ChatPrompt


def check_input(body: InputFields) -> None:
    """Raises InvalidInput unless there is either `input` or `messages`."""
    if (body.input is None) == (body.messages is None):
        raise InvalidInput("send either input or messages", param="input")
    if body.input is not None and not body.input:
        raise invalid("input", "is empty")


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
        raise InvalidInput(
            f"messages holds {len(chats)} conversations, at most {limit} (gateway.max_pool_inputs)"
        )
    prompts = []
    for index, chat in enumerate(chats):
        if not chat:
            raise InvalidInput(f"messages[{index}] is empty", param="messages")
        await move_inline_media(chat, run.services.uploads, run.context.access)
        settings, blobs = run.services.settings, run.services.uploads.blobs
        await move_tensors(embeds_parts(chat), run.job.card, blobs, settings)
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


_MEDIA_PARTS = ("image_url", "image", "input_image", "video_url", "video")


class Side:
    """Texts and images of one field, each of which is embedded for itself."""

    def __init__(self, name: str, given: Any) -> None:
        self.name = name
        self.is_list = isinstance(given, list)
        values = given if self.is_list else [given]
        if not values:
            raise invalid(name, "is empty")
        self.texts: dict[int, str] = {}
        """By their place among all."""
        self.chats: dict[int, Messages] = {}
        """Those with media, as conversations."""
        for index, each in enumerate(values):
            if isinstance(each, str):
                self.texts[index] = each
            elif _has_media(each):
                self.chats[index] = [{"role": "user", "content": each["content"]}]
            else:
                self.texts[index] = text_of(each, self.path_of(index))

    def __len__(self) -> int:
        return len(self.texts) + len(self.chats)

    def path_of(self, index: int) -> FieldPath:
        """The client's field of a text or image."""
        return (self.name, index) if self.is_list else (self.name,)

    async def items(
        self,
        run: PoolRun,
        options: bytes | None,
        *,
        prompt: str = "",
        are_second: bool = False,
        cuts_media: bool = True,
    ) -> list[PoolItem]:
        """Return the items of all of them, in their order.

        options: `ChatPrompt.mm_processor_kwargs_json`. prompt: put before each text. are_second: as
        in `PoolTokenizer.texts`. cuts_media: what holds media is cut as texts are, else it is an
        error if it is too long. Raises InvalidInput and what calls of tokenizers raise.
        """
        places = list(self.texts)

        def path_of(_kind: str, index: int) -> FieldPath:
            return self.path_of(places[index])

        found: dict[int, PoolItem] = {}
        if places:
            texts = (
                [prompt + text for text in self.texts.values()] if prompt else self.texts.values()
            )
            items = await run.services.tokenizer.texts(
                run.job, list(texts), path_of, are_second=are_second
            )
            found = dict(zip(places, items, strict=True))
        if self.chats:
            items = await self._chat_items(run, options, cuts_media=cuts_media)
            found |= dict(zip(self.chats, items, strict=True))
        return [found[index] for index in range(len(self))]

    async def _chat_items(
        self, run: PoolRun, options: bytes | None, *, cuts_media: bool
    ) -> list[PoolItem]:
        """Items of what has media, as the model's template writes a message of it."""
        prompts = []
        for index, chat in self.chats.items():
            try:
                await move_inline_media(chat, run.services.uploads, run.context.access)
            except InvalidInput as error:
                raise located(error, self.path_of(index)) from error
            prompts.append(
                ChatPrompt(
                    messages_json=msgspec.json.encode(chat),
                    mm_processor_kwargs_json=options,
                    add_generation_prompt=False,
                )
            )
        paths = [self.path_of(index) for index in self.chats]
        job = run.job if cuts_media else replace(run.job, truncate_tokens=None)
        return await run.services.tokenizer.chats(job, prompts, paths)

    def only_texts(self) -> list[str]:
        """All of them, for a model that reads pairs. Raises NotSupported for an image."""
        for index in self.chats:
            name = field_name(self.path_of(index))
            raise NotSupported(
                f"{name}: a model that scores pairs of texts takes no images", param=name
            )
        return list(self.texts.values())


def _has_media(given: dict[str, Any]) -> bool:
    """Return whether the content has parts besides text."""
    content = given.get("content")
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") in _MEDIA_PARTS for part in content
    )


def text_of(given: dict[str, Any], path: FieldPath) -> str:
    """The text of an object with `text`, or with a list `content` of parts of type text."""
    name = field_name(path)
    text = given.get("text")
    if isinstance(text, str):
        return text
    content = given.get("content")
    if not isinstance(content, list) or not content:
        raise invalid(name, "must be a string or an object with a text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise NotSupported(
                f"{name}: parts of type {str(kind)[:40]!r} are not supported yet, send text",
                param=name,
            )
        if not isinstance(part.get("text"), str):
            raise InvalidInput(f"{name}: a part of type text has no text", param=name)
        texts.append(part["text"])
    return "\n".join(texts)
