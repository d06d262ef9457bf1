"""Only modules that check the size of a client's text first make calls whose time grows with it.

A new one elsewhere fails here. Either it goes through the owner, or its module is added with what
bounds its text. Patterns of regular expressions are checked in tests/unit/test_linear_patterns.py,
fields of requests with hostile texts in tests/integration/test_every_text.py.
"""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import pytest

from tests.test_architecture import PACKAGE

_ENCODES: Final = {"encode", "encode_batch", "encode_batch_fast", "async_encode"}
_DECODES: Final = {"decode", "decode_batch"}
_SEARCHES: Final = {
    *("match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"),
}


CANDIDATES: Final = re.compile(
    r"_batch|_special_tokens|okenizer\.(?:en|de)code|\bre\.[a-z]|json\.load|b64decode|a2b_base64"
    r"|Image\.open|\bav\.|soundfile|from_string|SandboxedEnvironment|compress"
)
"""Files without any of these are not parsed, which takes seconds."""


@dataclass(frozen=True)
class Rule:
    """A kind of call, and the only modules that may make it: prefixes of paths."""

    finds: Callable[[ast.AST], bool]
    owners: dict[str, str]
    """The modules, and what bounds the text in each of them."""
    within: tuple[str, ...] = ("",)
    """Prefixes of the paths for which the rule is."""


def _names_of(node: ast.AST) -> tuple[str, str]:
    """`tokenizer`, `encode` of `self._tokenizer.encode`, called or handed on."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return "", node.id
    if not isinstance(node, ast.Attribute):
        return "", ""
    value = node.value
    if isinstance(value, ast.Attribute):
        return value.attr.strip("_"), node.attr
    return value.id.strip("_") if isinstance(value, ast.Name) else "", node.attr


def _of_tokenizer(node: ast.AST, methods: set[str]) -> bool:
    """Return whether object, option or method has the name that a tokenizer's call has."""
    if isinstance(node, ast.Call):
        options = {each.arg for each in node.keywords}
        is_special = bool(options & {"add_special_tokens", "skip_special_tokens"})
        return is_special and _names_of(node.func)[1] in methods
    owner, method = _names_of(node)
    return method in methods and (owner.endswith("tokenizer") or "_batch" in method)


def _is(module: str, *names: str) -> Callable[[ast.AST], bool]:
    return lambda node: _names_of(node) in {(module, each) for each in names}


def _named(*names: str) -> Callable[[ast.AST], bool]:
    return lambda node: _names_of(node)[1] in names


RULES: Final = {
    "a tokenizer encodes": Rule(
        lambda node: _of_tokenizer(node, _ENCODES),
        {
            "services/tokenizer_svc/encoding.py": "MOST_BYTES",
            "engine/models/pooling/instruction.py": "texts of a checkpoint",
            "engine/models/quantization/calibrate.py": "the operator's text",
        },
    ),
    "a tokenizer decodes": Rule(
        lambda node: _of_tokenizer(node, _DECODES),
        {
            "services/tokenizer_svc/encoding.py": "a number of ids",
            "engine/local_tokenizer.py": "a stream of the caller's own process",
        },
    ),
    "re without a compiled pattern": Rule(
        _is("re", *_SEARCHES),
        {
            "shared/errors.py": "the length of a message",
            "services/gateway/apis/pooling/moderations.py": "labels of a model",
            "services/tokenizer_svc/media/processor.py": "the text of one item, by the processor",
            "engine/adapters/": "a file of the operator",
            "engine/models/": "names of a checkpoint",
        },
        within=("engine/", "services/", "shared/"),
    ),
    "JSON by the slower parser": Rule(
        _is("json", "loads", "load"),
        {
            "services/gateway/apis/openai/structured_limits.py": "max_grammar_bytes; in a thread",
            "services/gateway/parsers/tools/": "one value of a model's answer",
            "services/mm_encoder_svc/checkpoint.py": "a file of the operator",
            "services/tokenizer_svc/conversation.py": "in the rendering process, which is killed",
            "services/tokenizer_svc/loading.py": "a file of the operator",
            "services/tokenizer_svc/media/processor.py": "MOST_OPTION_BYTES",
            "services/tokenizer_svc/retrieval.py": "a file of the operator",
            "shared/bus/nats_frames.py": "the server's greeting",
            "shared/config": "a setting of the operator",
            "shared/ctranslate2/": "a file of the operator",
            "shared/tensor_file.py": "a file of the operator",
        },
        within=("services/gateway/", "services/tokenizer_svc/", "services/mm_", "shared/"),
    ),
    "base64": Rule(
        _named("b64decode", "a2b_base64"),
        {
            "shared/base64_text.py": "in windows; its callers check the length or are in a thread",
        },
        within=("engine/", "services/", "shared/"),
    ),
    "files of media": Rule(
        lambda node: (
            _is("Image", "open")(node)
            or _is("av", "open")(node)
            or _is("soundfile", "SoundFile", "read", "info")(node)
        ),
        {
            "services/tokenizer_svc/media/audio_child.py": "its own silence",
            "services/tokenizer_svc/media/audio_file.py": "the process of audio_child.py",
            "services/tokenizer_svc/media/image_file.py": "the process of decode_child.py",
            "services/tokenizer_svc/media/video_child.py": "its own frames",
            "services/tokenizer_svc/media/video_file.py": "the process of video_child.py",
        },
    ),
    "templates": Rule(
        _named("from_string", "ImmutableSandboxedEnvironment", "SandboxedEnvironment"),
        {"services/tokenizer_svc/template.py": "the rendering process, which is killed"},
    ),
    "compression": Rule(
        _named("compress", "decompress", "decompressobj"),
        {
            "services/gateway/apis/audio/segments.py": "the tokens of a clip",
            "services/tokenizer_svc/actor.py": "PART_BYTES; in a thread",
            "services/tokenizer_svc/loading.py": "a file of the operator",
            "services/worker_svc/": "traces of a profile",
        },
        within=("engine/", "services/", "shared/"),
    ),
}


@cache
def nodes() -> list[tuple[str, int, frozenset[str]]]:
    """Where there is something of some kinds."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(text)) if CANDIDATES.search(text) else ():
            if isinstance(node, ast.Call | ast.Attribute | ast.Name):
                kinds = frozenset(kind for kind, rule in RULES.items() if rule.finds(node))
                if kinds:
                    found.append((name, node.lineno, kinds))
    return found


@pytest.mark.parametrize("kind", RULES)
def test_calls_on_texts_of_any_length_stand_where_they_are_bounded(kind: str) -> None:
    rule = RULES[kind]
    found = [
        (name, line)
        for name, line, kinds in nodes()
        if kind in kinds and name.startswith(rule.within)
    ]
    owners = tuple(rule.owners)
    assert [f"{name}:{line}" for name, line in found if not name.startswith(owners)] == []
    unused = [each for each in owners if not any(name.startswith(each) for name, _ in found)]
    assert unused == []


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("a tokenizer encodes", "self._tokenizer.encode(text)"),
        ("a tokenizer encodes", "plain.encode(text, add_special_tokens=False)"),
        ("a tokenizer encodes", "found.encode_batch_fast([text])"),
        ("a tokenizer decodes", "partial(self.model.tokenizer.decode, ids)"),
        ("a tokenizer decodes", "each.decode(ids, skip_special_tokens=False)"),
        ("re without a compiled pattern", "re.sub(text, '', other)"),
        ("JSON by the slower parser", "json.loads(data)"),
        ("base64", "base64.b64decode(text)"),
        ("files of media", "Image.open(file)"),
        ("templates", "environment.from_string(text)"),
    ],
)
def test_such_a_call_is_found(kind: str, line: str) -> None:
    assert CANDIDATES.search(line)
    assert any(map(RULES[kind].finds, ast.walk(ast.parse(line))))


@pytest.mark.parametrize("line", ["text.encode()", "msgspec.json.decode(data)", "_NAME.match(x)"])
def test_other_calls_are_not_found(line: str) -> None:
    for node in ast.walk(ast.parse(line)):
        assert not any(rule.finds(node) for rule in RULES.values())
