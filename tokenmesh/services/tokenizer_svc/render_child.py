"""The rendering process: reads jobs from stdin, writes answers to stdout, until stdin ends.

The kernel enforces its limits for any template: it kills the process when the alarm of a job goes
off, and refuses memory beyond its address space, files, connections and further processes. A
template that escapes jinja2's sandbox can neither read nor send anything. `python -m
...render_child <seconds> <bytes>`.
"""

import codecs
import html
import pprint
import resource
import sys
import textwrap
import unicodedata
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Final

import jinja2._identifier
import jinja2.constants
import jinja2.debug
import msgspec
from jinja2 import TemplateError, TemplateSyntaxError

from tokenmesh.services.tokenizer_svc.conversation import (
    CannotContinue,
    UnusableMessages,
    cut_at_mark,
    mark_end,
    shape_messages,
)
from tokenmesh.services.tokenizer_svc.render_job import (
    JsonObject,
    RenderAnswer,
    Rendered,
    RenderFailed,
    RenderJob,
    decode_job,
    encode,
)
from tokenmesh.services.tokenizer_svc.system_messages import system_first
from tokenmesh.services.tokenizer_svc.template import (
    ChatTemplate,
    RaisedByTemplate,
    TooLong,
    compile_template,
    render,
    template_line,
)
from tokenmesh.shared.child_pool import serve
from tokenmesh.shared.messages.tokenize import FieldWarning

_CODECS: Final = (
    *("ascii", "latin-1", "utf-7", "utf-8-sig", "cp1252", "idna", "punycode"),
    *("unicode-escape", "raw-unicode-escape"),
    *("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"),
)
_LOADED_AHEAD: Final = (
    *(jinja2._identifier, jinja2.constants, jinja2.debug, html, pprint, textwrap, unicodedata),
    *(codecs.lookup(name) for name in _CODECS),
    datetime.fromtimestamp(0),
)
"""Parts that jinja2, str and datetime load lazily, the local time zone included: later no file can
be opened."""


def render_job(job: RenderJob) -> RenderAnswer:
    """Execute one job; every failure is an answer."""
    try:
        warnings: list[FieldWarning] = []
        return Rendered(_render(job, warnings), warnings)
    except TemplateSyntaxError as error:
        return RenderFailed("syntax", error.message or "syntax error", error.lineno)
    except RaisedByTemplate as error:
        return RenderFailed("raised", str(error), template_line(error))
    except UnusableMessages as error:
        return RenderFailed("input", str(error), path=error.path)
    except CannotContinue as error:
        return RenderFailed("input", str(error))
    except TooLong as error:
        return RenderFailed("too_long", str(error))
    except MemoryError:
        return RenderFailed("memory", "it needs more memory than a rendering may use")
    # A template can raise any exception; all are errors of the template or of the input.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:1000]
        return RenderFailed("error", reason, template_line(error))


def _render(job: RenderJob, warnings: list[FieldWarning]) -> str:
    template = compile_template(job.template)
    if job.compile_only:
        return ""
    messages = shape_messages(job, template.shape_of, warnings)
    if job.merges_system:
        messages = system_first(messages, partial(_probe, template, job))
    final_text = mark_end(messages, job.template) if job.continue_final_message else None
    text = _printed(template, job, messages)
    return text if final_text is None else cut_at_mark(text, final_text)


def _probe(template: ChatTemplate, job: RenderJob, messages: list[JsonObject]) -> str:
    """Render other messages; empty where the template refuses them."""
    probe = msgspec.structs.replace(job, messages=messages)
    try:
        return _printed(template, job, shape_messages(probe, template.shape_of, []))
    except (RaisedByTemplate, TemplateError):
        return ""


def _printed(template: ChatTemplate, job: RenderJob, messages: list[JsonObject]) -> str:
    variables: dict[str, object] = {
        **job.variables,
        "messages": messages,
        "tools": job.tools,
        "documents": job.documents,
        "add_generation_prompt": job.add_generation_prompt,
    }
    return render(template, variables, job.max_chars)


def prepare(data: bytes) -> Callable[[], bytes]:
    """The function that executes a job."""
    return lambda: _encoded(render_job(decode_job(data)))


def _encoded(answer: RenderAnswer) -> bytes:
    try:
        return encode(answer)
    except UnicodeEncodeError:
        # A template can write any character, also in what it raises.
        return encode(RenderFailed("error", "it writes one half of a surrogate pair"))


def _confine(memory_bytes: int) -> None:
    # What is not loaded does not exist from here on, instead of being a file that cannot be opened.
    sys.meta_path.clear()
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


if __name__ == "__main__":
    _confine(int(sys.argv[2]))
    serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]), prepare)
