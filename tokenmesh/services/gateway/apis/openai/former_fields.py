"""Fields of other servers, and former ones of vLLM's, that change the answer: refused by name.

Other unknown fields are ignored with a warning. These are not: without them a client gets an answer
that it did not ask for.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid


@dataclass(frozen=True, slots=True)
class _Former:
    instead: str
    neutral: tuple[object, ...] = ()
    """Values without effect, besides null."""


_CONSTRAINT: Final = "structured_outputs"
_FORMER: Final[Mapping[str, _Former]] = {
    # vLLM before structured_outputs
    "guided_json": _Former(f"{_CONSTRAINT}.json"),
    "guided_regex": _Former(f"{_CONSTRAINT}.regex"),
    "guided_choice": _Former(f"{_CONSTRAINT}.choice"),
    "guided_grammar": _Former(f"{_CONSTRAINT}.grammar"),
    "guided_json_object": _Former(f"{_CONSTRAINT}.json_object", (False,)),
    "guided_whitespace_pattern": _Former(f"{_CONSTRAINT}.whitespace_pattern"),
    "guided_decoding": _Former(_CONSTRAINT),
    "structural_tag": _Former(f"{_CONSTRAINT}.structural_tag"),
    # SGLang, TGI and llama.cpp
    "regex": _Former(f"{_CONSTRAINT}.regex"),
    "ebnf": _Former(f"{_CONSTRAINT}.grammar"),
    "grammar": _Former(f"{_CONSTRAINT}.grammar", ("",)),
    "json_schema": _Former("response_format"),
    "max_new_tokens": _Former("max_tokens"),
    "min_new_tokens": _Former("min_tokens", (0,)),
    "n_predict": _Former("max_tokens", (-1,)),
    "repeat_penalty": _Former("repetition_penalty", (1,)),
    "typical_p": _Former("top_p or min_p", (1,)),
    "mirostat": _Former("top_p or min_p", (0,)),
    "tfs_z": _Former("top_p or min_p", (1,)),
    "top_n_sigma": _Former("min_p", (-1, 0)),
    "dry_multiplier": _Former("repetition_penalty", (0,)),
    "xtc_probability": _Former("top_p or min_p", (0,)),
    "dynatemp_range": _Former("temperature", (0,)),
    "best_of": _Former("n", (1,)),
    "logits_processors": _Former("logit_bias", ([],)),
}
_EXTRA_BODY: Final = "extra_body"


def refuse_former_fields(extra: Mapping[str, Any] | None, known: Collection[str]) -> None:
    """Raise NotSupported for such a field among those of a body that are not declared.

    `known`: the declared ones; in an object `extra_body` they would have no effect.
    """
    for name, value in (extra or {}).items():
        if name == _EXTRA_BODY and isinstance(value, dict):
            refuse_former_fields(value, ())
            lost = [each for each in value if each in known and value[each] is not None]
            if lost:
                raise invalid(
                    f"{_EXTRA_BODY}.{lost[0]}",
                    "has no effect: extra_body is an argument of OpenAI's Python client, which "
                    "puts its fields into the body. Send them there",
                    NotSupported,
                )
            continue
        former = _FORMER.get(name)
        if former is not None and value is not None and value not in former.neutral:
            raise invalid(name, f"is not supported: use {former.instead}", NotSupported)
