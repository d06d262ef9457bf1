"""The shipped chat template, run as a server runs it: a jinja2 sandbox with `tojson`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scripts.demo_model.mixture import Dialog


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _raise_exception(message: str) -> Undefined:
    raise ValueError(message)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, path: Path) -> None:
        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        sandbox.filters["tojson"] = _to_json
        sandbox.globals["raise_exception"] = _raise_exception
        self._template = sandbox.from_string(path.read_text())

    def render(self, dialog: Dialog, *, add_generation_prompt: bool = False) -> str:
        """The text of `dialog`, ready for the tokenizer."""
        switches: dict[str, Any] = {}
        if dialog.enable_thinking is not None:
            switches["enable_thinking"] = dialog.enable_thinking
        return self._template.render(
            messages=dialog.messages,
            tools=dialog.tools or None,
            add_generation_prompt=add_generation_prompt,
            **switches,
        )
