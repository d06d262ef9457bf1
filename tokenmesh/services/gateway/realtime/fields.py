"""What a client says of a session, or of one response: the fields, checked one by one."""

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from tokenmesh.services.gateway.openai.bounded import Bounded
from tokenmesh.services.gateway.openai.errors import NotSupported
from tokenmesh.services.gateway.openai.lenient import INT32_MAX
from tokenmesh.shared.errors import InvalidInput

_STRICT: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Tool(Bounded):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Reasoning(Bounded):
    """How much to think."""

    model_config = _STRICT

    effort: str | None = None


class GenerationFields(Bounded):
    """What sessions and responses have in common. None: as it was."""

    model_config = _STRICT

    instructions: str | None = None
    output_modalities: list[Literal["text", "audio"]] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | Literal["inf"] | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    reasoning: Reasoning | None = None

    audio: dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    """Known and not served."""


class SessionFields(GenerationFields):
    """The session of a session.update."""

    type: Literal["realtime", "transcription"] = "realtime"
    model: str | None = None
    include: list[str] | None = None
    tracing: Any = None
    truncation: Any = None


class ResponseFields(GenerationFields):
    """The response of a response.create."""

    conversation: str | None = None
    """`none`: neither part of the conversation nor, with an `input`, made from it."""
    input: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


def check_served(fields: GenerationFields, place: str) -> None:
    """Raises NotSupported, naming the field, for what this version has not."""
    _check_text(fields, place)
    for name in ("prompt", "include", "tracing"):
        if getattr(fields, name, None):
            raise _not_served(f"{place}.{name}")
    if isinstance(fields, SessionFields):
        if fields.type != "realtime":
            raise _not_served(f"{place}.type", "'transcription' ")
        if fields.truncation not in (None, "disabled"):
            raise _not_served(f"{place}.truncation", "anything but 'disabled' ")
    _check_choice(fields.tool_choice, f"{place}.tool_choice")
    names = [tool.name for tool in fields.tools or ()]
    if len(set(names)) < len(names):
        raise InvalidInput(f"{place}.tools: two have one name", param=f"{place}.tools")


def _check_text(fields: GenerationFields, place: str) -> None:
    if fields.audio:
        raise _not_served(f"{place}.audio", "audio ")
    if fields.output_modalities is not None and fields.output_modalities != ["text"]:
        raise NotSupported(
            f"{place}.output_modalities must be ['text']: audio is not supported yet",
            param=f"{place}.output_modalities",
        )


def _check_choice(choice: str | dict[str, Any] | None, place: str) -> None:
    if choice is None or choice in ("auto", "none", "required"):
        return
    if isinstance(choice, dict) and choice.get("type") == "mcp":
        raise _not_served(f"{place}.type", "'mcp' ")
    if not (isinstance(choice, dict) and choice.get("type") == "function" and choice.get("name")):
        raise InvalidInput(
            f"{place} must be 'auto', 'none', 'required' or "
            '{"type": "function", "name": ...}',
            param=place,
        )


def _not_served(param: str, what: str = "") -> NotSupported:
    return NotSupported(f"{param}: {what}is not supported yet", param=param)
