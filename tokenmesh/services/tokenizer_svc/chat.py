"""ChatRenderer: chooses the template of a chat request, and renders it in a child process."""

import logging
from asyncio.subprocess import Process
from typing import Final

from tokenmesh.services.tokenizer_svc.loading import DEFAULT_TEMPLATE, LoadedTokenizer
from tokenmesh.services.tokenizer_svc.media.speech import ONLY_TRANSCRIBING
from tokenmesh.services.tokenizer_svc.messages import ChatInput
from tokenmesh.services.tokenizer_svc.render_job import (
    RenderAnswer,
    Rendered,
    RenderFailed,
    RenderJob,
    decode_answer,
    encode,
)
from tokenmesh.shared.child_pool import ChildDied, ChildLate, ChildLimits, ChildPool
from tokenmesh.shared.config.model import TokenizerSettings
from tokenmesh.shared.errors import (
    CheckpointError,
    ConfigError,
    InvalidInput,
    PayloadTooLarge,
    TokenMeshError,
)
from tokenmesh.shared.messages.tokenize import ChatPrompt

MAX_TEMPLATE_CHARS: Final = 200_000
"""Length of a chat template that a request brings."""

_CHILD: Final = "tokenmesh.services.tokenizer_svc.render_child"


class Renderer:
    """Renders jobs in at most `num_processes` child processes, which start when first needed.

    A process that exceeds its time or memory is killed and fails only its job.
    """

    def __init__(self, limits: TokenizerSettings, num_processes: int) -> None:
        self._pool = ChildPool(
            "chat templates to be rendered",
            _CHILD,
            (str(limits.render_time_limit_s), str(limits.render_memory_bytes)),
            ChildLimits(
                num_processes,
                limits.render_queue,
                limits.render_time_limit_s,
                most_each=num_processes,
            ),
            encode(RenderJob(template="", max_chars=0, compile_only=True)),
        )

    @property
    def processes(self) -> tuple[Process, ...]:
        """The processes that are running."""
        return self._pool.processes

    async def render(self, job: RenderJob, tenant: str = "", cost: float = 1.0) -> RenderAnswer:
        """Render a job; tenants take turns. Raises Overloaded when too many jobs wait."""
        try:
            return decode_answer(await self._pool.ask(encode(job), tenant, cost))
        except ChildLate as error:
            return RenderFailed("too_long", error.message)
        except ChildDied as error:
            return RenderFailed("memory", error.message)

    async def stop(self) -> None:
        """Kill all processes; running jobs fail."""
        await self._pool.stop()


logger = logging.getLogger(__name__)

_TOOL_TEMPLATE: Final = "tool_use"


class ChatRenderer:
    """Renders chats of every model; templates from requests run in separate processes."""

    def __init__(self, limits: TokenizerSettings) -> None:
        self._limits = limits
        self._own = Renderer(limits, limits.render_processes)
        self._foreign = Renderer(limits, 1)

    async def stop(self) -> None:
        await self._own.stop()
        await self._foreign.stop()

    async def check(self, model: LoadedTokenizer, is_configured: bool) -> None:
        """Compile the model's templates, so that errors show when the service starts.

        Raises ConfigError for a configured template. An error in the checkpoint's template is
        logged: the model still serves everything except chats.
        """
        for name, template in model.templates.items():
            job = RenderJob(template=template, max_chars=0, compile_only=True)
            answer = await self._own.render(job)
            if isinstance(answer, Rendered):
                continue
            reason = f"chat template {name!r} is invalid: {_describe(answer)}"
            if is_configured:
                raise ConfigError(reason, param="chat_template")
            logger.error("%s: %s", model.directory, reason)

    async def render(
        self,
        model: LoadedTokenizer,
        prompt: ChatPrompt,
        conversation: ChatInput,
        placeholders: dict[str, str],
        tenant: str,
    ) -> Rendered:
        """The prompt's text, and warnings; tenants take turns.

        Raises InvalidInput, or CheckpointError for a broken template.
        """
        template, is_foreign = self._choose(model, prompt, bool(conversation.tools))
        job = RenderJob(
            template=template,
            messages=conversation.messages,
            tools=conversation.tools,
            documents=conversation.documents,
            variables={**model.special_tokens, **conversation.variables},
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            merges_system=prompt.merges_system,
            placeholders=placeholders,
            max_chars=self._limits.max_prompt_chars,
        )
        renderer = self._foreign if is_foreign else self._own
        answer = await renderer.render(job, tenant, len(prompt.messages_json))
        if isinstance(answer, Rendered):
            return answer
        raise _error(answer, is_foreign)

    def _choose(
        self, model: LoadedTokenizer, prompt: ChatPrompt, has_tools: bool
    ) -> tuple[str, bool]:
        """The template, and whether the client sent it."""
        requested, templates = prompt.chat_template, model.templates
        if requested is not None and requested not in templates:
            return self._accept(requested), True
        name = requested or (_TOOL_TEMPLATE if has_tools else DEFAULT_TEMPLATE)
        found = templates.get(name) or templates.get(DEFAULT_TEMPLATE)
        if found is not None:
            return found, False
        if model.config.get("model_type") in ONLY_TRANSCRIBING:
            raise InvalidInput(
                "the model transcribes recordings and does not chat. Use /v1/audio/transcriptions",
                param="model",
            )
        known = f"; it has {', '.join(sorted(templates))}" if templates else ""
        raise InvalidInput(
            f"the model has no default chat template{known}. Use /v1/completions, or start with "
            "--chat-template",
            param="messages",
        )

    def _accept(self, template: str) -> str:
        if not self._limits.trust_request_chat_template:
            raise InvalidInput(
                "chat templates in requests are not allowed; the operator can allow them with "
                "tokenizer.trust_request_chat_template",
                param="chat_template",
            )
        if len(template) > MAX_TEMPLATE_CHARS:
            raise InvalidInput(
                f"chat_template is longer than {MAX_TEMPLATE_CHARS} characters",
                param="chat_template",
            )
        return template


def _describe(failed: RenderFailed) -> str:
    return f"line {failed.line}: {failed.reason}" if failed.line else failed.reason


def _error(failed: RenderFailed, is_foreign: bool) -> TokenMeshError:
    reason = _describe(failed)
    blame = "chat_template" if is_foreign else "messages"
    match failed.kind:
        case "syntax" if not is_foreign:
            return CheckpointError(f"the model's chat template is invalid: {reason}")
        case "syntax":
            return InvalidInput(f"chat_template is invalid: {reason}", param=blame)
        case "raised":
            # A message of the template's author to the client, who needs no line number.
            return InvalidInput(failed.reason, param="messages")
        case "input":
            return InvalidInput(failed.reason, param="messages", path=failed.path)
        case "error":
            return InvalidInput(f"the chat template fails on these messages: {reason}", param=blame)
        case "too_long" | "memory":
            return PayloadTooLarge(f"the chat template exceeds a limit: {reason}", param=blame)
