"""ChatRenderer: which template a chat request gets, and its text out of a rendering process."""

import logging
from typing import Final, NoReturn

from tokenmesh.services.tokenizer_svc.loading import DEFAULT_TEMPLATE, LoadedModel
from tokenmesh.services.tokenizer_svc.messages import Conversation
from tokenmesh.services.tokenizer_svc.render_job import Rendered, RenderFailed, RenderJob
from tokenmesh.services.tokenizer_svc.renderer import Renderer
from tokenmesh.shared.config.model import TokenizerSettings
from tokenmesh.shared.errors import (
    CheckpointError,
    ConfigError,
    InvalidInput,
    PayloadTooLarge,
    TokenMeshError,
)
from tokenmesh.shared.messages.tokenize import ChatPrompt

logger = logging.getLogger(__name__)

_TOOL_TEMPLATE: Final = "tool_use"


class ChatRenderer:
    """Renders chats of every model; templates that requests bring get processes of their own."""

    def __init__(self, limits: TokenizerSettings) -> None:
        self._limits = limits
        self._own = Renderer(limits, limits.render_processes)
        self._foreign = Renderer(limits, 1)

    async def stop(self) -> None:
        """End the rendering processes."""
        await self._own.stop()
        await self._foreign.stop()

    async def check(self, model: LoadedModel, is_configured: bool) -> None:
        """Compile the model's templates, so that a broken one shows when the service starts.

        Raises ConfigError for one that the operator gave. One that came with the checkpoint is
        logged: its model still serves everything but chats.
        """
        for name, template in model.templates.items():
            job = RenderJob(template=template, max_chars=0, compile_only=True)
            answer = await self._own.render(job)
            if isinstance(answer, Rendered):
                continue
            reason = f"chat template {name!r} is broken: {_describe(answer)}"
            if is_configured:
                raise ConfigError(reason, param="chat_template")
            logger.error("%s: %s", model.directory, reason)

    async def render(
        self,
        model: LoadedModel,
        prompt: ChatPrompt,
        conversation: Conversation,
        image_placeholder: str,
        tenant: str,
    ) -> str:
        """The prompt's text; tenants take turns.

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
            image_placeholder=image_placeholder,
            max_chars=self._limits.max_prompt_chars,
        )
        renderer = self._foreign if is_foreign else self._own
        answer = await renderer.render(job, tenant, len(prompt.messages_json))
        if isinstance(answer, Rendered):
            return answer.text
        _fail(answer, is_foreign)

    def _choose(self, model: LoadedModel, prompt: ChatPrompt, has_tools: bool) -> tuple[str, bool]:
        """The template and whether a client wrote it."""
        asked, templates = prompt.chat_template, model.templates
        if asked is not None and asked not in templates:
            return self._accept(asked), True
        name = asked or (_TOOL_TEMPLATE if has_tools else DEFAULT_TEMPLATE)
        found = templates.get(name) or templates.get(DEFAULT_TEMPLATE)
        if found is not None:
            return found, False
        known = f"; it has {', '.join(sorted(templates))}" if templates else ""
        raise InvalidInput(
            f"the model has no default chat template{known}. Use /v1/completions, or start with "
            "--chat-template",
            param="messages",
        )

    def _accept(self, template: str) -> str:
        if not self._limits.trust_request_chat_template:
            raise InvalidInput(
                "chat templates in requests are refused here: the operator allows them with "
                "tokenizer.trust_request_chat_template",
                param="chat_template",
            )
        if len(template) > self._limits.max_template_chars:
            raise InvalidInput(
                f"chat_template is longer than {self._limits.max_template_chars} characters",
                param="chat_template",
            )
        return template


def _describe(failed: RenderFailed) -> str:
    return f"line {failed.line}: {failed.reason}" if failed.line else failed.reason


def _fail(failed: RenderFailed, is_foreign: bool) -> NoReturn:
    raise _error(failed, is_foreign)


def _error(failed: RenderFailed, is_foreign: bool) -> TokenMeshError:
    reason = _describe(failed)
    blame = "chat_template" if is_foreign else "messages"
    match failed.kind:
        case "syntax" if not is_foreign:
            return CheckpointError(f"the model's chat template is broken: {reason}")
        case "syntax":
            return InvalidInput(f"chat_template is broken: {reason}", param=blame)
        case "raised":
            # The template's own words to the client: its line says nothing to them.
            return InvalidInput(failed.reason, param="messages")
        case "input":
            return InvalidInput(failed.reason, param="messages", path=failed.path)
        case "error":
            return InvalidInput(f"the chat template fails on these messages: {reason}", param=blame)
        case "too_long" | "memory":
            return PayloadTooLarge(f"the chat template is stopped: {reason}", param=blame)
