"""Know which regular expressions each library follows to the letter.

What xgrammar does not know it takes for a literal (`\\A` for "A", `^` and `$` in the middle for
nothing); llguidance reads a few constructs otherwise than Python and JavaScript do. The rules here
say what is passed on; everything else is for the other library, or refused by name.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from tokenmesh.engine.grammar.matcher import CannotCompile
from tokenmesh.shared.json_schema import changed_schema

_TOKEN: Final = re.compile(
    r"""(?P<escape>\\(?:[xupP]\{[^}\\]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.))
    |(?P<set>\[\^?\]?(?:\\.?|[^\]\\])*(?:\]|(?P<open>\Z)))
    |(?P<group>\((?:\?(?:[^:()<=!>]*[:)]|P?<[^>=!(]*>|P?[^)]?[=!]?))?)
    |(?P<times>(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})(?P<more>[*+?]|\{[0-9]+(?:,[0-9]*)?\})*)
    |(?P<char>.)""",
    re.VERBOSE | re.DOTALL,
)
_PLAIN_ESCAPE: Final = re.compile(
    r"\\(?:[dwsntrfv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[!-/:-@\[-`{-~ ])", re.ASCII
)
_IN_SET: Final = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
_WORD, _SPACE = r"\p{L}_\p{N}", r"\s\x1c-\x1f\s"
"""It holds what stands in a class of llguidance for Python's own; its `\\w` has marks too, and no
fractions.

All begin and end with an escape, so that a dash next to them makes no range.
"""
_FOR_GUIDANCE: Final = {
    **{r"\w": _WORD, r"\W": rf"\p{{Z}}[^{_WORD}]\p{{Z}}"},
    **{r"\s": _SPACE, r"\S": rf"\d[^{_SPACE}]\d"},
    # these it takes for the ends of words
    **{r"\<": "<", r"\>": ">"},
}
_TO_CLASS: Final = re.compile(r".-\\[dws]", re.DOTALL)
_LAZY: Final = re.compile(r"(?:[*+?]|\{[^}]*\})\?")
_SHOWN: Final = 20


def xgrammar_regex(pattern: str) -> str:
    """The expression for xgrammar. Raises CannotCompile for what it does not follow."""
    pieces: list[str] = []
    tokens = list(_tokens(pattern))
    for index, (kind, text) in enumerate(tokens):
        is_known = True
        if kind == "escape":
            is_known = _PLAIN_ESCAPE.fullmatch(text) is not None
        elif kind == "set":
            is_known = _is_plain_set(text)
        elif kind == "group":
            is_known = text in ("(", "(?:")
        elif text == "^":
            is_known = index == 0
        elif text == "$":
            is_known = index == len(tokens) - 1
        elif text == ".":
            # its own would match a line feed
            text = r"[^\n]"
        if not is_known:
            raise CannotCompile(f"it does not follow {text[:_SHOWN]!r} to the letter")
        pieces.append(text)
    return "".join(pieces)


def guidance_regex(pattern: str) -> str:
    """The expression for llguidance. Raises CannotCompile for what it reads otherwise than Python.

    Characters that are newer than Python's Unicode count as the library knows them; and under the
    flag i a class takes U+0345, a mark that is an iota otherwise, with the letters.
    """
    pieces = []
    for kind, text in _tokens(pattern):
        inner = text[1:-1]
        if kind == "set" and (
            any(mark in inner for mark in ("&&", "--", "~~")) or "[" in _IN_SET.sub("", inner)
        ):
            raise CannotCompile(f"it reads the class {text[:_SHOWN]!r} otherwise: escape its marks")
        if kind == "group" and text.startswith("(?") and _flags(text) & {"R", "x"}:
            # under x it leaves blanks out of classes too
            raise CannotCompile(f"it does not follow {text[:_SHOWN]!r}")
        if kind == "set":
            text = _IN_SET.sub(lambda found: _FOR_GUIDANCE.get(found[0], found[0]), text)
        elif kind == "escape" and text in _FOR_GUIDANCE:
            plain = _FOR_GUIDANCE[text]
            text = f"(?-i:[{plain}])" if len(plain) > 1 else plain
        pieces.append(text)
    return "".join(pieces)


def with_guidance_patterns(schema: Any) -> Any:
    """A copy of a JSON schema with such expressions. Raises CannotCompile for one of its own."""
    return changed_schema(schema, _with_patterns)


def _with_patterns(node: dict[str, Any]) -> dict[str, Any]:
    pattern, by_pattern = node.get("pattern"), node.get("patternProperties")
    if isinstance(pattern, str):
        node["pattern"] = guidance_regex(pattern)
    if isinstance(by_pattern, dict):
        node["patternProperties"] = {guidance_regex(key): each for key, each in by_pattern.items()}
        if len(node["patternProperties"]) < len(by_pattern):
            raise CannotCompile("two keys of patternProperties are one expression")
    return node


def _tokens(pattern: str) -> Iterator[tuple[str, str]]:
    """Kinds and texts. Raises CannotCompile for what neither library follows."""
    for found in _TOKEN.finditer(pattern):
        kind, text = found.lastgroup or "", found.group()
        if kind == "more":
            kind = "times"
        if found["open"] is not None:
            raise CannotCompile("a class without its end: write \\[ for the character")
        if kind == "times" and found["more"] is not None and not _is_lazy(text):
            # possessive in Python, a repetition of the repetition in the library
            raise CannotCompile(f"the repetition {text[:_SHOWN]!r} of a repetition")
        if kind == "char" and text in "{":
            raise CannotCompile(
                "a brace without a number behind it: write \\{ for the character, and {0,2} where "
                "{,2} is meant"
            )
        yield kind, text


def _flags(group: str) -> set[str]:
    """Letters of the flags that a group sets, of the text it begins with."""
    return set(group.partition("<")[0].partition("-")[0])


def _is_lazy(text: str) -> bool:
    """Return whether it is one repetition that takes as little as it can, which is the same
    language.
    """
    return _LAZY.fullmatch(text) is not None


def _is_plain_set(text: str) -> bool:
    inner = text[1:-1]
    is_negated = inner.startswith("^")
    escapes = _IN_SET.findall(inner)
    # its classes are those of ASCII: of fewer characters, but of more where they are negated
    if is_negated and any(each in (r"\d", r"\w", r"\s") for each in escapes):
        return False
    # it takes a bracket at the beginning for the end, and a class for the end of a range
    rest = inner.removeprefix("^")
    is_other = rest.startswith("]") or _TO_CLASS.search(rest)
    return not is_other and all(_PLAIN_ESCAPE.fullmatch(each) for each in escapes)
