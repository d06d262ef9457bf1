"""ScorePairs: the ids of pairs of texts, each of which a template makes a prompt."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from tokenizers import Tokenizer

from tokenmesh.services.tokenizer_svc.encoding import encode_with_ends
from tokenmesh.services.tokenizer_svc.messages import ChatInput, read_variables
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.services.tokenizer_svc.score_template import ScoreTemplate
from tokenmesh.services.tokenizer_svc.threads import Threads
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.model import TokenizerSettings
from tokenmesh.shared.errors import (
    DeadlineExceeded,
    FieldPath,
    InvalidInput,
    PayloadTooLarge,
    PromptTooLong,
)
from tokenmesh.shared.messages.tokenize import ChatPrompt, TextsTokenized, Tokenize, TokenizeTexts
from tokenmesh.shared.tokens import pack_ids

_KWARGS: Final = "chat_template_kwargs"
_MOST_CHARS: Final = 1 << 24
"""The most characters of all pairs of a message: seconds of work."""
_MOST_CUTS: Final = 8
"""The most cuts of one text: a token may hold part of a character, so that one cut leaves a token
too many."""


Render = Callable[[Tokenize, ChatPrompt, ChatInput], Awaitable[list[int]]]
"""The ids of a rendered conversation."""


class ScorePairs:
    """The pairs of one model."""

    def __init__(
        self,
        template: ScoreTemplate | None,
        tokenizer: Tokenizer,
        limits: TokenizerSettings,
        threads: Threads,
        render: Render,
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._limits = limits
        self._threads = threads
        self._render = render

    def takes(self, message: TokenizeTexts) -> bool:
        """Return whether a template writes its pairs.

        Raises InvalidInput for variables without one.
        """
        if not message.pairs:
            return False
        if message.chat_template is None and self._template is None:
            if message.template_kwargs_json is not None:
                raise InvalidInput(
                    f"{_KWARGS}: the model has no template for scores. Start with --chat-template, "
                    "or send chat_template",
                    param=_KWARGS,
                )
            return False
        return True

    async def tokenize(self, message: TokenizeTexts, deadline_s: float) -> TextsTokenized:
        """Raises InvalidInput that names a text by `path`, Overloaded, DeadlineExceeded."""
        # Without a template of its own the request has one.
        own = self._template or ScoreTemplate("")
        _check_size(message)
        variables = {**own.variables, **read_variables(message.template_kwargs_json)}
        prompt = ChatPrompt(
            messages_json=b"",
            chat_template=message.chat_template or own.name,
            add_generation_prompt=own.add_generation_prompt,
            add_special_tokens=message.add_special_tokens,
        )
        firsts = [
            await self._cut(text, message.max_text_tokens, message, ("texts", index))
            for index, text in enumerate(message.texts)
        ]

        async def ids_of(index: int) -> list[int]:
            path = ("pairs", index)
            second = await self._cut(message.pairs[index], message.max_pair_tokens, message, path)
            first = firsts[index if len(firsts) > 1 else 0]
            return await self._ids(first, second, variables, prompt, message, path)

        # The processes that render take so many at a time; further ones would fill their queue.
        at_once = max(1, self._limits.render_processes)
        found: list[list[int]] = []
        for start in range(0, len(message.pairs), at_once):
            if now_s() > deadline_s:
                raise DeadlineExceeded("the pairs were not encoded in time")
            indices = range(start, min(start + at_once, len(message.pairs)))
            done = await asyncio.gather(*map(ids_of, indices), return_exceptions=True)
            for each in done:
                if isinstance(each, BaseException):
                    raise each
                found.append(each)
        return TextsTokenized(token_ids=[pack_ids(ids) for ids in found])

    async def _ids(
        self,
        first: str,
        second: str,
        variables: JsonObject,
        prompt: ChatPrompt,
        message: TokenizeTexts,
        path: FieldPath,
    ) -> list[int]:
        messages: list[JsonObject] = [
            {"role": "query", "content": first},
            {"role": "document", "content": second},
        ]
        given = Tokenize(
            request_id=message.request_id,
            model=message.model,
            prompt=prompt,
            truncate_prompt_tokens=message.truncate_prompt_tokens,
            truncation_side=message.truncation_side,
            context_tokens=message.context_tokens,
            tenant=message.tenant,
        )
        conversation = ChatInput(messages, None, None, variables, [])
        limit = message.context_tokens
        try:
            ids = await self._render(given, prompt, conversation)
            if not ids:
                raise InvalidInput("the template writes no token for the texts")
            if limit is not None and len(ids) > limit:
                found = f"your texts resulted in {len(ids)} tokens"
                raise PromptTooLong.over(limit, found, "the length of the text", param="messages")
        except InvalidInput as error:
            if error.param in (None, "messages", "prompt"):
                error.param, error.path = str(path[1]), path
            raise
        return ids

    async def _cut(
        self, text: str, most: int | None, message: TokenizeTexts, path: FieldPath
    ) -> str:
        """At most so many tokens of a text."""
        if most is None:
            return text
        work = partial(cut_text, self._tokenizer, text, most)
        try:
            return await self._threads.run_text(message.tenant, len(text), work)
        except InvalidInput as error:
            error.param, error.path = str(path[1]), path
            raise


def _check_size(message: TokenizeTexts) -> None:
    """Raises PayloadTooLarge: each pair has its own copy of the query and of the variables."""
    num_pairs = len(message.pairs)
    copies = num_pairs if len(message.texts) == 1 else 1
    num_chars = sum(map(len, message.pairs)) + copies * sum(map(len, message.texts))
    num_chars += num_pairs * len(message.template_kwargs_json or b"")
    if num_chars > _MOST_CHARS:
        raise PayloadTooLarge(
            f"{num_pairs} pairs of {num_chars} characters in all, at most {_MOST_CHARS}: send "
            "fewer pairs at a time, or a shorter query"
        )


def cut_text(tokenizer: Tokenizer, text: str, most: int) -> str:
    """The beginning of a text that has at most so many tokens, without special ones.

    Raises InvalidInput where no end of a character gives that.
    """
    for _ in range(_MOST_CUTS):
        ids, ends = encode_with_ends(tokenizer, text)
        if len(ids) <= most:
            return text
        # the token behind the last one may be part of its last character
        text = text[: min(ends[most - 1], len(text) - 1)]
    raise InvalidInput(f"the text cannot be cut to {most} tokens")
