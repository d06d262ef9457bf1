"""Every refusal of something that is too large or too much names the setting that bounds it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.fixed import is_fixed
from tokenmesh.shared.config.model import ModelSettings

ROOT = Path(__file__).parents[3] / "tokenmesh"
SCANNED = ("services/gateway", "services/tokenizer_svc", "shared/blobs.py", "shared/codec.py")
ERRORS = (
    "PayloadTooLarge",
    "InvalidInput",
    "invalid",
    "ValueError",
    "TooLong",
    "BadLine",
    "Refusal",
)
SIZE = re.compile(r"at most|more than|longer than|larger than|limit|over the|too many|too large")
SETTING = re.compile(
    r"\b(?:gateway|tokenizer|model|responses|batches|bus|redis|worker|encoder)"
    r"(?:\.[a-z_]+)*\.([a-z_]+)?"
)
OTHERS = {
    # by another field of the request, or by the model
    "max_tokens ()",
    "max_pattern_size",
    "max_model_len",
    "more than max_tokens",
    "the model takes at most",
    "the model's context holds",
    "the limit of the tenant",
    "at most one choice",
    # the caller adds the name
    "leads to more than ",
    "the file has more than  bytes",
    "the file has  bytes, at most ",
    "the prompt holds  , at most  ()",
    # by how a file is made, which no setting changes
    "scans",
    "channels, at most",
    "it is too large",
    "one side is more than",
    "the image is too large:",
    "a field's name is longer than",
    "a message holds more than",
    "the chat template exceeds a limit: ",
    "with prompt_embeds more than once",
    "tokens holds  ids, at most ",
    # constants: what is read at once, whatever the model takes
    "holds  characters, at most ",
    "has more than  characters",
    "pairs of  characters in all, at most ",
    "bytes can be read at once",
    "mm_processor_kwargs is ",
    "holds  ids, at most ",
    "the schemas of calls have more than ",
    "it is larger than  bytes",
    "sent  times",
    "at most  with use_beam_search",
    "stop[] has  characters, at most ",
    "bytes of JSON, at most ",
    "tools: choose with allowed_tools",
    "chat_template is longer than ",
    "the URL is longer than ",
    "the uuid is longer than ",
    "its groups are  deep, at most ",
    "its repetitions multiply to , at most ",
    "it has more than  parts",
    "it is nested more than  deep",
    "bytes describes at most ",
    "messages hold  content parts, at most ",
    "the URL redirects more than ",
    "the recordings of the conversation would have ",
    "the model would get  frames of ",
    "bad_words holds  entries, at most ",
}
"""Parts of texts about bounds that are no setting."""


def texts() -> Iterator[tuple[str, str]]:
    """Place and text of each error that speaks of a size; what is put into a text is left out."""
    for place in SCANNED:
        found = ROOT / place
        for path in sorted(found.rglob("*.py")) if found.is_dir() else [found]:
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                if ast.unparse(node.func) not in ERRORS:
                    continue
                words = [
                    part.value
                    for argument in node.args
                    for part in ast.walk(argument)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                ]
                text = "".join(words)
                if SIZE.search(text):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def names(kind: type[BaseModel]) -> Iterator[str]:
    """All settings, without the names of what holds them."""
    for name, field in kind.model_fields.items():
        if not is_fixed(field):
            yield name
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from names(inner)


def test_a_refusal_by_a_size_names_its_setting() -> None:
    found = list(texts())
    assert len(found) > 60
    unnamed = [
        f"{place}: {text}"
        for place, text in found
        if not SETTING.search(text) and not any(other in text for other in OTHERS)
    ]
    assert unnamed == []


def test_the_settings_that_refusals_name_exist() -> None:
    known = {*names(Settings), *names(ModelSettings)}
    named = {name for _, text in texts() for name in SETTING.findall(text) if name}
    assert "max_json_values" in named or "max_json_" in named
    # names that are put together begin with what is common
    assert {each for each in named if each not in known and not each.endswith("_")} == set()
