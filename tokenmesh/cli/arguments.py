"""Reads a `vllm serve` line as typer cannot: argparse's habits, vLLM's flags, kind errors."""

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from tokenmesh.cli.flags import FLAGS, json_object
from tokenmesh.cli.vllm_flags import FIXED, NAMES, REFUSED, SHORT, Fixed
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)

_SEVERAL: Final = frozenset(flag.name for flag in FLAGS if flag.takes_several)
_OBJECTS: Final = frozenset(flag.name for flag in FLAGS if flag.convert is json_object)
_BENCH_SEVERAL: Final = frozenset(("--goodput",))
_NEGATION: Final = "--no-"


def arrange(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """The arguments of a command, as typer wants them.

    `--served-model-name a b` becomes two flags, `--max_model_len` is spelled with hyphens,
    `--max-model 1k` is completed, flags of vLLM without an effect here are dropped, and
    one that is not in `known` raises ConfigError.
    """
    arranged: list[str] = []
    words = list(arguments)
    objects: dict[str, dict[str, Any]] = {}
    while words:
        word = words.pop(0)
        if word == "--":
            return [*_joined(objects), *arranged, word, *words]
        if not _is_flag(word):
            arranged.append(word)
            continue
        given, equals, value = word.partition("=")
        name = _name_of(given, known)
        bare = name.removeprefix("--")
        if name in known and name in _OBJECTS:
            text = value if equals else _value_of(given, words)
            if isinstance(whole := json_object(text), dict):
                objects.setdefault(name, {}).update(whole)
            else:
                arranged.append(f"{name}={text}")
        elif name in known:
            arranged += _with_values(name, equals, value, words)
        elif name.partition(".")[0] in _OBJECTS:
            text = value if equals else _value_of(given, words)
            _keep_key(objects, name.partition(".")[0], given.partition(".")[2], text)
        elif bare in FIXED:
            _take_fixed(given, FIXED[bare], equals, value, words)
        elif (equals or words) and any(each.startswith(f"{name}.") for each in known):
            words[:0] = _dotted(name, value if equals else words.pop(0))
        elif not _is_negation_of_missing(name):
            raise _refusal(given, name)
    return [*_joined(objects), *arranged]


def join_values(words: Sequence[str]) -> list[str]:
    """Make `--goodput a --goodput b` of `--goodput a b`: vLLM's flags take several words."""
    joined: list[str] = []
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = word if word in _BENCH_SEVERAL else ""
        elif flag and joined[-1] != flag:
            joined.append(flag)
        joined.append(word)
    return joined


def _with_values(name: str, equals: str, value: str, words: list[str]) -> Iterator[str]:
    if name not in _SEVERAL or equals:
        yield f"{name}{equals}{value}"
        return
    for each in _leading_values(words):
        yield from (name, each)


def _is_flag(word: str) -> bool:
    """A negative number is a value."""
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit()


def _leading_values(words: list[str]) -> Iterator[str]:
    """Take the words up to the next flag; a flag needs at least one."""
    while words and not _is_flag(words[0]):
        yield words.pop(0)


def _name_of(given: str, known: Collection[str]) -> str:
    """The flag as it is spelled in a table; a beginning that only one flag has will do.

    Raises ConfigError when several have it.
    """
    if not given.startswith("--"):
        # -O3 and -cc.mode are flags with their values.
        short, dot, key = given.partition(".")
        stem = short.rstrip("0123456789")
        return f"--{SHORT[stem]}{dot}{key}" if stem in SHORT else given
    name = given.replace("_", "-")
    stem, dot, key = name.partition(".")
    if name in known or stem.removeprefix("--") in NAMES:
        return name
    begun = sorted(
        each for each in {*known, *(f"--{other}" for other in NAMES)} if each.startswith(stem)
    )
    if len(begun) > 1 and len(stem) > len(_NEGATION):
        raise ConfigError(f"{given} may be any of {', '.join(begun)}", param=given)
    return f"{begun[0]}{dot}{key}" if len(begun) == 1 else name


def _take_fixed(given: str, fixed: Fixed, equals: str, value: str, words: list[str]) -> None:
    """Leave a flag out that changes nothing. Raises ConfigError for a value that would."""
    if fixed.warns:
        logger.warning("%s: %s", given, fixed.meaning)
    if fixed.values is None:
        return
    if not equals:
        value = _value_of(given, words)
    if fixed.values and value not in fixed.values:
        allowed = " or ".join(fixed.values)
        raise ConfigError(f"{given} can only be {allowed}: {fixed.meaning}", param=given)


def _value_of(given: str, words: list[str]) -> str:
    """Take a flag's value. Raises ConfigError when there is none."""
    if not words or _is_flag(words[0]):
        raise ConfigError(f"{given} needs a value", param=given)
    return words.pop(0)


def _keep_key(objects: dict[str, dict[str, Any]], flag: str, path: str, text: str) -> None:
    """`--a.b.c 1` sets a key of the object that `--a` takes."""
    *parts, last = path.split(".")
    place = objects.setdefault(flag, {})
    for part in parts:
        place = place.setdefault(part, {})
    place[last] = json_object(text)


def _joined(objects: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    return (f"{flag}={json.dumps(value)}" for flag, value in objects.items())


def _dotted(name: str, text: str) -> list[str]:
    """`--a '{"b": 1}'` as vLLM reads it: `--a.b=1`."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} takes a JSON object: {error}", param=name) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name} takes a JSON object", param=name)
    return [
        f"{name}.{key}={given if isinstance(given, str) else json.dumps(given)}"
        for key, given in values.items()
        if given is not None
    ]


def _is_negation_of_missing(name: str) -> bool:
    """`--no-enable-x` of something that does not exist here is what the mesh does anyway."""
    positive = name.removeprefix(_NEGATION)
    return name.startswith("--no-enable-") and positive in NAMES and positive not in FIXED


def _refusal(given: str, name: str) -> ConfigError:
    """The error about a flag of vLLM that is not served, with what to do instead."""
    stem = name.partition(".")[0]
    bare = stem.removeprefix(_NEGATION).removeprefix("--")
    if bare not in NAMES:
        what = f"unknown flag {given}; --help lists the flags that there are"
        return ConfigError(what, param=given)
    reason = FIXED[bare].meaning if bare in FIXED else REFUSED[bare]
    what = f"{given} is a flag of vLLM that TokenMesh does not have: {reason}"
    return ConfigError(what, param=given)
