"""Asking the other services: with a deadline, again when it may help, and with the right answer.

A service of several processes is a queue group. One that stays silent may stand still or be dead:
then another one is asked as well, by its own name.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from tokenmesh.services.gateway.mesh.hedging import first_answer
from tokenmesh.services.gateway.mesh.held_prompts import HeldPrompts, prompt_size
from tokenmesh.services.gateway.mesh.retry_policy import RetryPolicy, is_own_word
from tokenmesh.shared.bus.base import Bus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.gateway import GatewaySettings
from tokenmesh.shared.errors import (
    DeadlineExceeded,
    Overloaded,
    ProtocolError,
    TokenMeshError,
)
from tokenmesh.shared.ids import WorkerId
from tokenmesh.shared.messages import (
    Message,
    Place,
    Placed,
    Queued,
    Refused,
    Tokenize,
    Tokenized,
)
from tokenmesh.shared.messages.tokenize import IdsPrompt
from tokenmesh.shared.subjects import place as place_subject
from tokenmesh.shared.subjects import tokenize as tokenize_subject
from tokenmesh.shared.tokens import BYTES_PER_ID

_Answer = TypeVar("_Answer")


class ServiceCalls:
    """The bus as the gateway uses it."""

    def __init__(
        self,
        bus: Bus,
        settings: GatewaySettings,
        other: Callable[[str], str],
        left_out: Callable[[], list[WorkerId]],
        prompts: HeldPrompts,
    ) -> None:
        """`other`: where to ask, instead of on a subject, once nobody has answered there.

        `left_out`: workers that no placement should choose. `prompts`: holds what is too large to
        be sent at once.
        """
        self._bus = bus
        self._settings = settings
        self._other = other
        self._left_out = left_out
        self._prompts = prompts

    @property
    def max_message_bytes(self) -> int:
        """See `Bus.max_message_bytes`."""
        return self._bus.max_message_bytes

    async def ask(
        self,
        subject: str,
        message: Message,
        expected: type[_Answer],
        *,
        timeout_s: float,
        deadline_s: float,
        patience_s: float | None = None,
    ) -> _Answer:
        """The answer; one attempt takes `timeout_s` at most, all end at `deadline_s`.

        After `patience_s` (default: `second_ask_s`) of silence somebody else is asked as well.
        While nobody is there it waits, for `service_wait_s` at most.

        Raises the last error, ProtocolError for an answer of another type.
        """
        patience = RetryPolicy(self._settings, deadline_s)
        while True:
            limit_s = min(deadline_s, now_s() + timeout_s)
            try:
                answer = await first_answer(
                    partial(self._ask_once, subject, message, limit_s),
                    patience_s=patience_s or self._settings.second_ask_s,
                    max_asks=self._settings.call_attempts,
                )
            except TokenMeshError as error:
                await patience.wait(error)
            else:
                return _checked(answer, expected)

    async def _ask_once(
        self, subject: str, message: Message, limit_s: float, is_again: bool
    ) -> Message:
        subject = self._other(subject) if is_again else subject
        return await self._bus.request(subject, message, deadline_s=limit_s)

    async def tokenize(self, message: Tokenize, deadline_s: float) -> Tokenized:
        """Any tokenizer's answer. Raises as `ask`, and what is wrong with the prompt."""
        settings = self._settings
        with self._prompts.holding(message, self.max_message_bytes) as question:
            return await self.ask(
                tokenize_subject(message.model),
                question,
                Tokenized,
                timeout_s=settings.tokenize_timeout_s,
                deadline_s=deadline_s,
                # What is long takes longer, and must not be encoded many times over because of it.
                patience_s=settings.second_ask_s + _size(message) / settings.second_ask_chars_per_s,
            )

    async def place(self, message: Place, deadline_s: float) -> Placed:
        """Wait for a worker, as long as a scheduler says that there is hope.

        Raises Overloaded when it refuses, Unavailable when it has waited for a worker in vain, and
        the last error when no scheduler has said anything for `service_wait_s`.
        """
        patience = RetryPolicy(self._settings, deadline_s)
        first_word_s = self._settings.second_ask_s
        subject = group = place_subject(message.model)
        if left_out := self._left_out():
            exclude = list(dict.fromkeys((*message.exclude, *left_out)))
            message = msgspec.structs.replace(message, exclude=exclude)
        while True:
            try:
                return await self._place_once(subject, message, deadline_s, first_word_s)
            except TokenMeshError as error:
                if is_own_word(error):
                    raise
                is_silent = isinstance(error, DeadlineExceeded)
                await patience.wait(error, is_silence=is_silent)
                # The one heard from last may be gone by now: then anybody else will do.
                subject = self._other(group) if is_silent else group
                first_word_s = min(first_word_s * 2, self._settings.place_idle_s)

    async def _place_once(
        self, subject: str, message: Place, deadline_s: float, first_word_s: float
    ) -> Placed:
        """`first_word_s`: a scheduler that lives tells at once who waits."""
        answer: Message | None = None
        idle_s = self._settings.place_idle_s
        answers = self._bus.converse(subject, message, deadline_s=deadline_s, idle_s=idle_s)
        try:
            async with asyncio.timeout(min(first_word_s, idle_s)) as first_word:
                async for answer in answers:
                    first_word.reschedule(None)
                    if not isinstance(answer, Queued):
                        break
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer from {subject} in time") from error
        if isinstance(answer, Refused):
            raise Overloaded(answer.reason, retry_after_s=answer.retry_after_s)
        return _checked(answer, Placed)


def _size(message: Tokenize) -> int:
    """Of what is to be encoded: characters, or ids that are there already."""
    num_bytes = prompt_size(message)
    return num_bytes // BYTES_PER_ID if isinstance(message.prompt, IdsPrompt) else num_bytes


def _checked(answer: object, expected: type[_Answer]) -> _Answer:
    if not isinstance(answer, expected):
        got = type(answer).__name__
        raise ProtocolError(f"the answer is {got}, not {expected.__name__}")
    return answer
