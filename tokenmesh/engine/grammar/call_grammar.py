"""CallGrammar: an answer that is either what a constraint says or tool calls, for llguidance."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from tokenmesh.engine.api.structured import CallForms
from tokenmesh.engine.grammar.lark_schema import (
    SPACE_RULE,
    read_schema,
    schema_rules,
)
from tokenmesh.engine.grammar.matcher import CannotCompile
from tokenmesh.engine.grammar.token_table import TokenTable

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
        self._free = _ranges(free)

    def with_calls(self, answer: str, calls: CallForms) -> str:
        """The grammar `answer`, in either form of the library, or one call after the other."""
        # No space before calls: a model that begins with one has not chosen yet.
        bound = [form for form in calls.forms if form.schema is not None]
        free = [self._literal(form.begin) for form in calls.forms if form.schema is None]
        starts, rules = ["@answer"], [SPACE_RULE]
        if bound:
            starts.append("bound")
            opening, closing = self._maybe(calls.opening), self._maybe(calls.closing)
            rules.append(f"bound: {opening} call (SPACE? call)* SPACE? {closing}")
            rules.append(f"call: {' | '.join(f'call_{each}' for each in range(len(bound)))}")
        for number, form in enumerate(bound):
            rules += self._call(number, form.begin, read_schema(form.schema or "{}"), form.end)
        if free:
            # Where such a call ends is not known: no other one may follow.
            starts.append(f"({' | '.join(free)}) {self._any_token()}*")
        lines = [f"start: {' | '.join(starts)}", *rules]
        grammars = [{"lark_grammar": "\n".join(lines)}, {**_grammar(answer), "name": "answer"}]
        return json.dumps({"grammars": grammars})

    def in_text(self, structures: Sequence[dict[str, Any]], trigger: str) -> str:
        """Free text, in which the special token `trigger` begins one of the structures.

        Raises CannotCompile for another trigger.
        """
        marker = self._special.get(trigger)
        if marker is None:
            raise CannotCompile(f"calls begin with {trigger!r}, which is not a special token")
        calls = [f"call_{number}" for number in range(len(structures))]
        rules = [f"start: ({' | '.join([self._any_token(marker), *calls])})*", SPACE_RULE]
        for number, each in enumerate(structures):
            schema = read_schema(json.dumps(each["schema"]))
            rules += self._call(number, each["begin"], schema, each["end"])
        return "\n".join(rules)

    def _call(self, number: int, begin: str, schema: Any, end: str) -> list[str]:
        arguments = f"arguments-{number}"
        call = f"call_{number}: {self._literal(begin)} {arguments} {self._literal(end)}"
        return [call, *schema_rules(arguments, schema)]

    def _any_token(self, but: int | None = None) -> str:
        written: list[str] = []
        for first, last in self._free:
            if but is None or not first <= but <= last:
                written.append(f"{first}-{last}")
                continue
            written += [f"{first}-{but - 1}"] if first < but else []
            written += [f"{but + 1}-{last}"] if but < last else []
        return f"<[{','.join(written)}]>"

    def _maybe(self, text: str) -> str:
        return f"({self._literal(text)})?" if text else ""

    def _literal(self, text: str) -> str:
        """A text, in which special tokens are written by their names."""
        parts = (part for part in self._special_text.split(text) if part)
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part)
            for part in parts
        )


def _grammar(text: str) -> dict[str, Any]:
    """The only grammar of a text that is Lark, or a JSON list of grammars."""
    if not text.startswith("{"):
        return {"lark_grammar": text}
    (only,) = json.loads(text)["grammars"]
    return dict(only)


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers, those in a row as one range."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return [(first, last) for first, last in ranges]
