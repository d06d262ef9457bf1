"""A request of Ollama's API as a chat or a completion."""

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from tokenmesh.services.gateway.apis.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGeneration,
    OllamaMessage,
)
from tokenmesh.services.gateway.apis.ollama.writer import INVALID_ARGUMENTS
from tokenmesh.services.gateway.apis.openai.request import CompletionRequest, switch_thinking
from tokenmesh.services.gateway.apis.openai.translation import (
    ChatMessages,
    FieldNames,
    Json,
    TranslatedChat,
    arguments_text,
    chat_content,
    get_string,
    schema_format,
    validate_chat,
)
from tokenmesh.services.gateway.core.http.errors import NotSupported, invalid, invalid_fields

_OPTIONS: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Options by the fields of a chat that mean the same."""
_NO_EFFECT: Final[Mapping[str, Any]] = {"mirostat": 0, "typical_p": 1.0, "tfs_z": 1.0}
"""Options that other values of would change the answer."""
_IGNORED: Final = (
    "num_ctx",
    "num_keep",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "num_thread",
    "use_mmap",
    "use_mlock",
    "numa",
    "low_vram",
    "f16_kv",
    "vocab_only",
    "logits_all",
    "repeat_last_n",
    "penalize_newline",
    "mirostat_eta",
    "mirostat_tau",
    "draft_num_predict",
)
"""Options of a local engine: the mesh has its own settings."""
_NAMES: Final = {
    **{field: f"options.{option}" for option, field in _OPTIONS.items()},
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "reasoning_effort": "think",
    "suffix": "suffix",
}
_MEDIA_BY_START: Final = {"/9j/": "jpeg", "R0lGOD": "gif", "UklGR": "webp"}


def translate_chat(body: OllamaChatRequest, warnings: list[str]) -> TranslatedChat:
    """Raises InvalidInput that names the client's fields."""
    conversation = _Conversation()
    for index, message in enumerate(body.messages):
        conversation.add_message(message, f"messages[{index}]")
    fields = _shared(body, warnings)
    if body.tools:
        fields["tools"] = body.tools
    last = body.messages[-1]
    if last.role == "assistant" and not last.tool_calls:
        # The beginning of the answer.
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    return _chat(fields, conversation)


def translate_generate(body: OllamaGenerateRequest, warnings: list[str]) -> TranslatedChat:
    """A prompt as a chat of one message. Raises InvalidInput that names the client's fields."""
    _check_prompt(body)
    if body.suffix:
        raise invalid("suffix", "needs raw: true", NotSupported)
    conversation = _Conversation()
    if body.system:
        conversation.add({"role": "system", "content": body.system}, "system")
    message = OllamaMessage(role="user", content=body.prompt, images=body.images)
    conversation.add_message(message, "prompt", "images")
    return _chat(_shared(body, warnings), conversation)


def translate_raw(body: OllamaGenerateRequest, warnings: list[str]) -> CompletionRequest:
    """Raises InvalidInput that names the client's fields."""
    _check_prompt(body)
    for name in ("system", "images"):
        if getattr(body, name):
            raise invalid(name, "cannot be combined with raw")
    fields = _shared(body, warnings)
    for name in ("chat_template_kwargs", "reasoning_effort", "include_reasoning"):
        fields.pop(name, None)
    # Without num_predict the answer may be as long as there is room.
    fields.setdefault("max_tokens", None)
    fields |= {"prompt": body.prompt}
    if body.suffix:
        fields["suffix"] = body.suffix
    try:
        return CompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise invalid_fields(error, name_of=FieldNames(_NAMES, {}).name_of) from None


def _check_prompt(body: OllamaGenerateRequest) -> None:
    if body.template is not None:
        raise invalid("template", "is not supported", NotSupported)
    if body.context:
        raise invalid("context", "is not supported: use /api/chat", NotSupported)


def _chat(fields: Json, conversation: "_Conversation") -> TranslatedChat:
    names = FieldNames(_NAMES, conversation.sources)
    fields = {**fields, "messages": conversation.messages}
    return TranslatedChat(chat=validate_chat(fields, names), fields=names)


def _shared(body: OllamaGeneration, warnings: list[str]) -> Json:
    fields: Json = {
        "model": body.model,
        "stream": body.stream is not False,
        **_options(body.options or {}, warnings),
        **_format(body.format),
    }
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
    elif body.think is not None:
        fields["chat_template_kwargs"] = switch_thinking(body.think)
        fields["include_reasoning"] = body.think
    return fields


def _options(options: Mapping[str, Any], warnings: list[str]) -> Json:
    fields: Json = {}
    ignored = []
    for name, value in options.items():
        if value is None:
            continue
        if name in _OPTIONS:
            fields[_OPTIONS[name]] = value
        elif name == "num_predict":
            # 0, -1 and -2: as many as there is room for.
            if isinstance(value, int) and not isinstance(value, bool) and value <= 0:
                continue
            fields["max_tokens"] = value
        elif name in _NO_EFFECT:
            if value != _NO_EFFECT[name]:
                raise invalid(f"options.{name}", "is not supported", NotSupported)
        else:
            kind = "" if name in _IGNORED else " (unknown)"
            ignored.append(f"options.{name[:64]}{kind}")
    seed = fields.get("seed")
    if isinstance(seed, int) and seed < 0:
        # Ollama's default, a random one.
        del fields["seed"]
    if ignored:
        warnings.append(f"fields without effect: {', '.join(ignored[:16])}")
    return fields


def _format(given: str | dict[str, Any] | None) -> Json:
    if given is None or given == "":
        return {}
    if given == "json":
        return {"response_format": {"type": "json_object"}}
    if isinstance(given, str):
        raise invalid("format", "must be 'json' or a JSON schema")
    return {"response_format": schema_format(given)}


class _Conversation(ChatMessages):
    """Calls have no ids in Ollama's API: a result belongs to the oldest open call of its tool."""

    def __init__(self) -> None:
        super().__init__()
        self._num_calls = 0
        self._open: deque[tuple[str, str]] = deque()
        """Names and ids of calls without a result."""

    def add_message(self, message: OllamaMessage, path: str, images: str | None = None) -> None:
        """Append a message; `images`: the path of its images where that is another one."""
        if message.role == "tool":
            self._add_result(message, path)
            return
        parts: list[Json] = []
        if message.content:
            parts.append({"type": "text", "text": message.content})
        urls = [_data_uri(image) for image in message.images or ()]
        parts.extend({"type": "image_url", "image_url": {"url": url}} for url in urls)
        where = images or f"{path}.images"
        own: Json = {"role": message.role, "content": chat_content(parts) if parts else ""}
        if message.thinking:
            own["reasoning"] = message.thinking
        texts = [path] if message.content else []
        self.add(own, path, [*texts, *[where] * len(urls)])
        for index, call in enumerate(message.tool_calls or ()):
            self._add_call(message, call, f"{path}.tool_calls[{index}]")

    def _add_call(self, message: OllamaMessage, call: Json, path: str) -> None:
        function = call.get("function")
        if message.role != "assistant" or not isinstance(function, dict):
            raise invalid(f"{path}.function", "must be an object, in a message of the assistant")
        name, arguments = (
            get_string(function, "name", f"{path}.function"),
            function.get("arguments"),
        )
        if not isinstance(arguments, dict | str):
            raise invalid(f"{path}.function.arguments", "must be an object")
        call_id = f"call_{self._num_calls}"
        self._num_calls += 1
        self._open.append((name, call_id))
        self.add_call(
            call_id, name, arguments_text(arguments, INVALID_ARGUMENTS), f"{path}.function"
        )

    def _add_result(self, message: OllamaMessage, path: str) -> None:
        named = [each for each in self._open if message.tool_name in (None, each[0])]
        if not named:
            raise invalid(path, "is a result without a call: no open call has its tool_name")
        self._open.remove(named[0])
        result = {"role": "tool", "tool_call_id": named[0][1], "content": message.content or ""}
        self.add(result, path)


def _data_uri(image: str) -> str:
    """Base64 as a data URI; its kind is read from the content later, not from here."""
    if image.startswith("data:"):
        return image
    kinds = (kind for start, kind in _MEDIA_BY_START.items() if image.startswith(start))
    return f"data:image/{next(kinds, 'png')};base64,{image}"
