"""PromptText: the ids of the text that a prompt is, or that a template has made of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tokenmesh.services.tokenizer_svc.embeds_layout import EmbedsLayout
from tokenmesh.services.tokenizer_svc.media.media_model import StoredItem
from tokenmesh.services.tokenizer_svc.text_encoder import PORTION_CHARS, TextEncoder
from tokenmesh.services.tokenizer_svc.threads import Threads
from tokenmesh.services.tokenizer_svc.token_length import LengthBound
from tokenmesh.shared.errors import PromptTooLong
from tokenmesh.shared.messages.tokenize import ChatPrompt, Tokenize
from tokenmesh.shared.telemetry.span import span


@dataclass(frozen=True, slots=True)
class PromptIds:
    """The ids of a prompt, with one for each run of tokens of an item and for each tensor."""

    ids: list[int]
    stored: Sequence[StoredItem] = ()
    layout: EmbedsLayout | None = None
    """The layout of the tensors; None: there are none."""
    text: str = ""
    """The text that was encoded as a whole; empty: no text was."""


class PromptText:
    """Texts of one model."""

    def __init__(self, encoder: TextEncoder, threads: Threads, bound: LengthBound | None) -> None:
        self._encoder = encoder
        self._threads = threads
        self._bound = bound

    async def ids(
        self, text: str, add_special_tokens: bool, limit: int | None, message: Tokenize
    ) -> list[int]:
        """At most `limit` ids of a text. Raises PayloadTooLarge, PromptTooLong, Overloaded."""
        work, cost = self._encoder.work(
            text,
            add_special_tokens=add_special_tokens,
            max_tokens=limit,
            side=message.truncation_side,
            enough=message.max_tokens if message.truncate_prompt_tokens is None else None,
        )
        return await self.ids_by(work, text, cost, message)

    async def ids_by(
        self, work: Callable[[], list[int]], text: str, cost: int, message: Tokenize
    ) -> list[int]:
        """Return the ids that `work` gives for a text, unless that is too long for certain."""
        is_divided, is_cut = len(text) > PORTION_CHARS, message.truncate_prompt_tokens is not None
        if not is_cut:
            await self._check_length(text, message)
        with span("encode", {"tokenmesh.chars": len(text)}) as current:
            ids = await self._threads.run_text(message.tenant, cost, work)
            current.set_attribute("tokenmesh.tokens", len(ids))
        if is_divided and not is_cut and len(ids) > (message.max_tokens or len(ids)):
            raise _too_long(text, message, len(ids), message.max_tokens or 0)
        return ids

    async def _check_length(self, text: str, message: Tokenize) -> None:
        """Refuse a text that no encoding makes short enough, before it blocks a thread."""
        limit, bound = message.max_tokens or message.context_tokens, self._bound
        if limit is None or bound is None:
            return
        work = partial(bound.least_tokens, text, limit)
        # Only where spaces do not count must a text be read for it.
        cost = len(text) if bound.drops_spaces else 0
        if num_tokens := await self._threads.run_text(message.tenant, cost, work):
            raise _too_long(text, message, num_tokens, limit)


def _too_long(text: str, message: Tokenize, least: int, limit: int) -> PromptTooLong:
    where = "messages" if isinstance(message.prompt, ChatPrompt) else "prompt"
    return PromptTooLong.over(
        limit,
        f"your {where} of {len(text)} characters resulted in at least {least} tokens",
        f"the length of the {where}",
        param=where,
    )
