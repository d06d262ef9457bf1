"""Fields that are known and not served yet: a clear refusal, never silently dropped.

A field at its harmless value passes: clients send many of them with each request.
"""

from collections.abc import Callable
from typing import Any, Final

from tokenmesh.services.gateway.openai.chat_request import ChatRequest
from tokenmesh.services.gateway.openai.completion_request import CompletionRequest
from tokenmesh.services.gateway.openai.errors import NotSupported
from tokenmesh.services.gateway.openai.sampling_fields import SamplingFields

_Test = Callable[[Any], bool]

_SHOWN: Final = 80
_HINTS: Final = {
    "functions": "is not supported: OpenAI has replaced it by tools",
    "function_call": "is not supported: OpenAI has replaced it by tool_choice",
}


def _is_unset(value: Any) -> bool:
    return not value


def _is_free_tool_choice(value: Any) -> bool:
    return value in (None, "none", "auto")


_HARMLESS: Final[dict[str, _Test]] = {
    "watermarking": _is_unset,
    "service_tier": lambda value: value in (None, "auto", "default"),
    "return_token_offsets": _is_unset,
    "kv_transfer_params": _is_unset,
    "ec_transfer_params": _is_unset,
    "vllm_xargs": _is_unset,
    "return_mm_kwargs": _is_unset,
    "mm_payload": lambda value: value in (None, "tensors"),
    "routed_experts_prompt_start": _is_unset,
}

_HARMLESS_IN_CHAT: Final[dict[str, _Test]] = {
    "media_io_kwargs": _is_unset,
    "mm_processor_kwargs": _is_unset,
    "modalities": lambda value: not value or value == ["text"],
    "audio": _is_unset,
    "prediction": _is_unset,
    "functions": _is_unset,
    "function_call": _is_free_tool_choice,
    "web_search_options": lambda value: value is None,
}

_HARMLESS_IN_COMPLETION: Final[dict[str, _Test]] = {
    "best_of": lambda value: value in (None, 1),
}


_TESTS_BY_REQUEST: Final[dict[type[object], dict[str, _Test]]] = {
    ChatRequest: _HARMLESS | _HARMLESS_IN_CHAT,
    CompletionRequest: _HARMLESS | _HARMLESS_IN_COMPLETION,
}


def not_served(model: type[object]) -> frozenset[str]:
    """The names of such fields in a request's model."""
    return frozenset(_TESTS_BY_REQUEST.get(model, ()))


def refuse_not_supported(body: SamplingFields) -> None:
    """Raise NotSupported that names the first such field."""
    is_harmless = _TESTS_BY_REQUEST.get(type(body), _HARMLESS)
    for name in body.model_fields_set:
        value = getattr(body, name)
        if name in is_harmless and not is_harmless[name](value):
            shown = f" {value!r}" if isinstance(value, int | float) else ""
            if isinstance(value, str) and len(value) < _SHOWN:
                shown = f" {value!r}"
            hint = _HINTS.get(name, "is not supported yet")
            raise NotSupported(f"{name}{shown} {hint}", param=name)
