"""ContentGuard: text in message contents never becomes a special token.

A conversation is rendered twice: unchanged, and with characters of its contents replaced by private
ones. If both renderings differ only in these characters, every special token that is left in the
second one was written by the template. The text is split there, and special tokens between the
splits are encoded as ordinary text. If the renderings differ otherwise, the template depends on the
contents, and the request is refused.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from tokenizers import Tokenizer

from tokenmesh.services.tokenizer_svc.encoding import encode_texts
from tokenmesh.services.tokenizer_svc.messages import ChatInput
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.services.tokenizer_svc.text_encoder import TextEncoder
from tokenmesh.shared.errors import ConfigError, InvalidInput

_PRIVATE: Final = 0xF0000
"""The first private character that replaces another one."""
_MOST_PRIVATE: Final = 0xFFFE
"""The private characters of plane 15, U+F0000 to U+FFFFD; plane 16 is for marks of tensors."""
_PRIVATE_TEXT: Final = re.compile("[\U000f0000-\U000ffffe]")
_NEVER_REPLACED: Final = frozenset('"\\')
"""JSON escapes them (like control characters), so the renderings would differ."""
_FIELDS: Final = ("content", "reasoning_content", "thinking", "reasoning")
_PARAM: Final = "model.allow_special_tokens_in_content"

_WINDOW: Final = 1 << 14
"""Characters in which others are replaced in less than 2 ms."""
_SEARCHED: Final = 1 << 12
"""Characters that are searched in less than 1 ms; with a thousand tokens that each begin with
another character, in 5 ms."""

_MOST_DEPTH: Final = 32
"""Groups within groups of a pattern: deeper ones would end its compilation with an error."""
_MOST_CHOICES: Final = 4
"""That a pattern tries one after the other."""

Table = dict[int, int]


class ContentGuard:
    """The guard of one model's tokenizer; safe to call from threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for a tokenizer that cannot encode a text in pieces."""
        plain = Tokenizer.from_str(tokenizer.to_str())
        plain.encode_special_tokens = True
        self._whole, self._plain = TextEncoder(tokenizer), TextEncoder(plain)
        added = tokenizer.get_added_tokens_decoder().values()
        names = [token.content for token in added if token.special]
        self._special = dict(zip(names, encode_texts(tokenizer, names), strict=True))
        """The ids of special tokens by their text."""
        has_normalizer = tokenizer.normalizer is not None
        texts = [each.content for each in added if not (each.normalized and has_normalizer)]
        self._longest = max(map(len, (*texts, *names)), default=0)
        self._added = _any_of(texts)
        self._special_text = _any_of(sorted(names))
        self._tables = (_table({*"".join(names)}), _table(_marks(frozenset(names))))
        self._check(tokenizer, added)

    @property
    def tables(self) -> tuple[Table, ...]:
        """Replacements of characters, in the order in which to try them."""
        return self._tables

    def check(self, conversation: ChatInput) -> None:
        """Raises InvalidInput for a special token elsewhere than in contents."""
        rest: list[object] = [conversation.tools, conversation.documents, conversation.variables]
        contents: list[object] = []
        for message in conversation.messages:
            for key, value in message.items():
                (contents if _is_content(key, value) else rest).append(value)
                rest.append(key)
        for text in _strings(rest):
            if found := next(_matches(self._special_text, text, self._longest), None):
                raise InvalidInput(
                    f"the special token {found.group()!r} is allowed in the content of messages "
                    "only",
                    param="messages",
                )
        if any(next(_matches(_PRIVATE_TEXT, each, 1), None) for each in _strings(contents)):
            raise InvalidInput(
                "characters of the private plane U+F0000 are not allowed in messages",
                param="messages",
            )

    def hidden(self, conversation: ChatInput, table: Table) -> ChatInput:
        """The conversation with replaced characters."""
        messages = [_replaced(message, table) for message in conversation.messages]
        return replace(conversation, messages=messages)

    def shown(self, text: str, table: Table) -> str:
        """A rendering of a hidden conversation, with the original characters."""
        return _replaced_in(text, {private: char for char, private in table.items()})

    def encode(self, hidden: str, table: Table, add_special_tokens: bool) -> list[int]:
        """The ids of a rendering of a hidden conversation. Raises PayloadTooLarge."""
        pieces: list[str] = []
        specials: list[list[int]] = []
        start = 0
        for match in _matches(self._added, hidden, self._longest):
            special = self._special.get(match.group())
            if special is not None:
                pieces.append(self.shown(hidden[start : match.start()], table))
                specials.append(special)
                start = match.end()
        pieces.append(self.shown(hidden[start:], table))
        found = self._plain.all_ids(pieces)
        ids = found[0]
        for special, piece in zip(specials, found[1:], strict=True):
            ids += special
            ids += piece
        return self._whole.frame(is_pair=False, with_special=add_special_tokens).ids(ids, [])

    def refusal(self) -> InvalidInput:
        """The error for a conversation on whose contents the template depends."""
        return InvalidInput(
            "the chat template changes with the special characters of these messages, so that "
            "special tokens in them cannot be distinguished from its own: they are not allowed",
            param="messages",
        )

    def _check(self, tokenizer: Tokenizer, added: Any) -> None:
        """Check with samples that encoding in pieces gives the same ids as encoding at once."""
        for token in added:
            has_effects = token.lstrip or token.rstrip or token.single_word
            is_normalized = token.normalized and tokenizer.normalizer is not None
            if token.special and (has_effects or is_normalized or not token.content.strip()):
                raise _unusable(f"its token {token.content!r} consumes text around it")
        if '"prepend_scheme":"first"' in tokenizer.to_str():
            raise _unusable("it encodes the first word of a text differently")
        for special in sorted(self._special):
            text = f"{special}a B\n\n {special} c{special}{special}x  {special}"
            for adds in (False, True):
                (at_once,) = encode_texts(tokenizer, [text], add_special_tokens=adds)
                if self.encode(text, {}, adds) != at_once:
                    raise _unusable("it encodes the text after a special token differently")


def _unusable(reason: str) -> ConfigError:
    return ConfigError(f"{_PARAM} cannot be false with this tokenizer: {reason}", param=_PARAM)


def _any_of(texts: list[str]) -> re.Pattern[str]:
    """Matches the leftmost and longest text, as tokenizers match added tokens."""
    # Without texts: a pattern that never matches.
    return re.compile(_alternatives({*filter(None, texts)}, 0) if any(texts) else r"(?!)")


def _alternatives(texts: set[str], depth: int) -> str:
    """Write shared beginnings once: the time does not grow with the number of texts."""
    if depth == _MOST_DEPTH:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    by_first: dict[str, set[str]] = {}
    for text in texts - {""}:
        by_first.setdefault(text[0], set()).add(text)
    found: dict[str, str] = {}
    for first, group in by_first.items():
        low, high = min(group), max(group)
        differs = (place for place, char in enumerate(low) if char != high[place])
        shared = low[: next(differs, len(low))]
        rests = {text[len(shared) :] for text in group}
        rest = _alternatives(rests, depth + 1) if rests != {""} else ""
        # A text that another one goes on from is the last choice: the longest matches.
        found[first] = re.escape(shared) + (f"(?:{rest}){'?' * ('' in rests)}" if rest else "")
    return _by_first_char(found)


def _by_first_char(choices: Mapping[str, str]) -> str:
    """One of patterns, each by the character with which it begins; few of many are tried."""
    if len(choices) <= _MOST_CHOICES:
        return "|".join(choices.values())
    chars = [*choices]
    share = -(-len(chars) // _MOST_CHOICES)
    parts = (chars[start : start + share] for start in range(0, len(chars), share))
    within = "|".join(_by_first_char({char: choices[char] for char in part}) for part in parts)
    return f"(?=[{''.join(map(re.escape, chars))}])(?:{within})"


def _matches(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    """`pattern.finditer`, for matches of at most `longest` characters.

    Other threads wait while a pattern is searched for: so it is searched for in windows.
    """
    start = 0
    while start < len(text):
        window = min(len(text), start + _SEARCHED)
        match = pattern.search(text, start, min(len(text), window + longest))
        if match is not None and match.start() < window:
            yield match
            start = match.end()
        else:
            start = window


def _replaced_in(text: str, table: Mapping[int, int]) -> str:
    """`text.translate` where no character is both replaced and put in, in windows as well.

    One character after the other is replaced: `translate` takes five times as long.
    """
    pairs = [(chr(char), chr(other)) for char, other in table.items()]
    windows = []
    for start in range(0, len(text), _WINDOW):
        window = text[start : start + _WINDOW]
        for char, other in pairs:
            window = window.replace(char, other)
        windows.append(window)
    return "".join(windows)


def _is_replaceable(char: str) -> bool:
    return char.isprintable() and not char.isspace() and char not in _NEVER_REPLACED


def _marks(tokens: frozenset[str]) -> set[str]:
    """A small set of characters such that every token has one; templates rarely search for them."""
    found: set[str] = set()
    left = {token for token in tokens if any(map(_is_replaceable, token))}
    while left:
        counts: dict[str, int] = {}
        for token in left:
            for char in filter(_is_replaceable, set(token)):
                counts[char] = counts.get(char, 0) + 1
        # Templates do search for tags, which begin with brackets.
        best = max(counts, key=lambda each: (counts[each], not each.isalnum(), each not in "<>/"))
        found.add(best)
        left = {token for token in left if best not in token}
    return found


def _table(chars: set[str]) -> Table:
    replaced = sorted(filter(_is_replaceable, chars))[:_MOST_PRIVATE]
    return {ord(char): _PRIVATE + index for index, char in enumerate(replaced)}


def _replaced(message: JsonObject, table: Table) -> JsonObject:
    return {
        key: _translated(value, table) if _is_content(key, value) else value
        for key, value in message.items()
    }


def _is_content(key: str, value: object) -> bool:
    """Return whether the value of a message's field is text that is replaced."""
    if key not in _FIELDS:
        return False
    return isinstance(value, str) or (key == "content" and isinstance(value, list))


def _translated(content: object, table: Table) -> object:
    if isinstance(content, str):
        return _replaced_in(content, table)
    if isinstance(content, list):
        return [_translated_part(part, table) for part in content]
    return content


def _translated_part(part: object, table: Table) -> object:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {**part, "text": _replaced_in(part["text"], table)}
    return part


def _strings(value: object) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            todo.extend((*each.keys(), *each.values()))
        elif isinstance(each, list):
            todo.extend(each)
