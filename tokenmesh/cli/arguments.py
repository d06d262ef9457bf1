"""What typer cannot do with a `vllm serve` line: several words after a flag, and kind errors."""

import difflib
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from tokenmesh.cli import vllm_flags
from tokenmesh.cli.flags import FLAGS
from tokenmesh.shared.errors import ConfigError

_SEVERAL: Final = frozenset(flag.name for flag in FLAGS if flag.takes_several)


def arrange(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """The arguments of a command, as typer wants them.

    `--served-model-name a b` becomes two flags, `--max_model_len` is spelled with hyphens, and a
    flag that is not in `known` raises ConfigError with a suggestion.
    """
    arranged: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*arranged, word, *words]
        if not _is_flag(word):
            arranged.append(word)
            continue
        name, equals, value = word.partition("=")
        name = _check(name, known)
        if name in _SEVERAL and not equals:
            for value in _leading_values(words):
                arranged += [name, value]
        else:
            arranged.append(f"{name}{equals}{value}")
    return arranged


def _is_flag(word: str) -> bool:
    """A negative number is a value."""
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit()


def _leading_values(words: list[str]) -> Iterator[str]:
    """Take the words up to the next flag; a flag needs at least one."""
    while words and not _is_flag(words[0]):
        yield words.pop(0)


def _check(name: str, known: Collection[str]) -> str:
    spelled = name.replace("_", "-") if name.startswith("--") else name
    if spelled in known:
        return spelled
    bare = vllm_flags.SHORT.get(name, spelled.lstrip("-").partition(".")[0])
    bare = bare.removeprefix("no-") if bare not in vllm_flags.NAMES else bare
    if bare not in vllm_flags.NAMES:
        raise ConfigError(f"unknown flag {name}{_nearest(spelled, known)}", param=name)
    advice = vllm_flags.ADVICE.get(bare)
    hint = f": {advice}" if advice else _nearest(spelled, known)
    raise ConfigError(f"{name} is a flag of vLLM that TokenMesh does not have{hint}", param=name)


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
