"""CallGrammar: an answer that is either what a constraint says or tool calls, for llguidance."""

import json
import re
from collections.abc import Iterable
from typing import Any, Final

from tokenmesh.services.worker_svc.grammar.exact_regex import with_guidance_patterns
from tokenmesh.services.worker_svc.grammar.exact_schema import without_unknown_formats
from tokenmesh.services.worker_svc.grammar.token_table import TokenTable
from tokenmesh.shared.messages.structured import CallForms

_SPACE: Final = r"SPACE: /[ \t\r\n]{1,8}/"
_NEVER: Final = re.compile(r"(?!)")


class CallGrammar:
    """Writes grammars for one vocabulary."""

    def __init__(self, tokens: TokenTable) -> None:
        self._special = tokens.special_by_name
        longest_first = sorted(self._special, key=len, reverse=True)
        names = "|".join(map(re.escape, longest_first))
        self._special_text = re.compile(f"({names})") if names else _NEVER
        # An end token ends the answer, it is not a part of it; an id without a token is nothing.
        known = set(self._special.values()) - set(tokens.eos_ids)
        free = (each for each, piece in enumerate(tokens.tokens) if piece or each in known)
        self._any_token = f"<[{','.join(_ranges(free))}]>"

    def with_calls(self, answer: str, calls: CallForms) -> str:
        """The grammar `answer`, in either form of the library, or one call after the other."""
        # No space before calls: a model that begins with one has not chosen yet.
        bound = [form for form in calls.forms if form.schema is not None]
        free = [self._literal(form.begin) for form in calls.forms if form.schema is None]
        starts, rules = ["@answer"], [_SPACE]
        if bound:
            starts.append("bound")
            opening, closing = self._maybe(calls.opening), self._maybe(calls.closing)
            rules.append(f"bound: {opening} call (SPACE? call)* SPACE? {closing}")
            rules.append(f"call: {' | '.join(f'call_{each}' for each in range(len(bound)))}")
        for number, form in enumerate(bound):
            begin, end = self._literal(form.begin), self._literal(form.end)
            rules.append(f"call_{number}: {begin} arguments_{number} {end}")
            rules.append(f"arguments_{number}: %json {_schema(form.schema or '{}')}")
        if free:
            # Where such a call ends is not known: no other one may follow.
            starts.append(f"({' | '.join(free)}) {self._any_token}*")
        lines = [f"start: {' | '.join(starts)}", *rules]
        grammars = [{"lark_grammar": "\n".join(lines)}, {**_grammar(answer), "name": "answer"}]
        return json.dumps({"grammars": grammars})

    def _maybe(self, text: str) -> str:
        return f"({self._literal(text)})?" if text else ""

    def _literal(self, text: str) -> str:
        """A text, in which special tokens are written by their names."""
        parts = (part for part in self._special_text.split(text) if part)
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part)
            for part in parts
        )


def _schema(text: str) -> str:
    return json.dumps(with_guidance_patterns(without_unknown_formats(json.loads(text))))


def _grammar(text: str) -> dict[str, Any]:
    """The only grammar of a text that is Lark, or a JSON list of grammars."""
    if not text.startswith("{"):
        return {"lark_grammar": text}
    (only,) = json.loads(text)["grammars"]
    return dict(only)


def _ranges(numbers: Iterable[int]) -> list[str]:
    """Ascending numbers, those in a row as one range."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return [f"{first}-{last}" for first, last in ranges]
