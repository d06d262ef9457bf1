"""system_first: system messages of a conversation where a template takes none behind the first."""

from collections.abc import Callable
from typing import Final

from tokenmesh.services.tokenizer_svc.conversation import join_parts
from tokenmesh.services.tokenizer_svc.render_job import JsonObject

_LATER: Final = "laterinstruction"
"""Any word that no template writes."""
_PROBE: Final[list[JsonObject]] = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "system", "content": _LATER},
    {"role": "user", "content": "c"},
]


def system_first(
    messages: list[JsonObject], render: Callable[[list[JsonObject]], str]
) -> list[JsonObject]:
    """Shaped messages, those of the system in one where the template refuses others or does not
    print them.

    render: renders messages that are not shaped yet by that template; nothing where it refuses.
    """
    if all(each.get("role") != "system" for each in messages[1:]):
        return messages
    return messages if _LATER in render(_PROBE) else _merged(messages)


def _merged(messages: list[JsonObject]) -> list[JsonObject]:
    """Shaped messages with the texts of all system messages, line by line, in a first one."""
    texts = [_text_of(each) for each in messages if each.get("role") == "system"]
    others = [each for each in messages if each.get("role") != "system"]
    first = next(each for each in messages if each.get("role") == "system")
    text = "\n".join(texts)
    is_text = isinstance(first["content"], str)
    content: object = text if is_text else [{"type": "text", "text": text}]
    return [{**first, "content": content}, *others]


def _text_of(message: JsonObject) -> str:
    content = message["content"]
    return content if isinstance(content, str) else join_parts(content or [], {})
