"""The header of a harmony message: who it is for, and on which channel."""

import re
from dataclasses import dataclass
from typing import Final

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"

_NOBODY: Final = frozenset({"", "all", "assistant", "user"})
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]*)")
_KNOWN: Final = re.compile(
    r"<\|(?:start|channel|constrain)\|>|\bto=[^\s<]*|\b(?:assistant|analysis|commentary|final|json)\b"
)


@dataclass(frozen=True, slots=True)
class HarmonyHeader:
    """What a header says."""

    channel: str = ""
    recipient: str = ""
    """Empty: the user."""


def read_header(text: str) -> HarmonyHeader:
    """The header in the text between a message's start and its `<|message|>`.

    The recipient may stand before the channel or behind it, and a content type behind both.
    """
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    to = recipient.group(1) if recipient is not None else ""
    return HarmonyHeader(
        channel.group(1) if channel is not None else "", "" if to in _NOBODY else to
    )


def stray_text(text: str) -> str:
    """What in a header that was never finished belongs to no header."""
    return _KNOWN.sub("", text).strip()
