"""Mistral: [TOOL_CALLS] before a JSON array of calls, or before a name and its arguments.

The second form, since tokenizer 11, is [TOOL_CALLS]name[ARGS]{...} with a marker for each call, an
optional [CALL_ID]id after the name, and an optional [ARGS]. Mistral's chat templates accept only
ids of nine letters and digits, so every call gets one: the model's, or one made from the choice's
seed and the call's index, which is the same when the answer is parsed again.
"""

import hashlib
import re
import string
from functools import partial
from typing import Final

from tokenmesh.services.gateway.parsers.formats import MakeId
from tokenmesh.services.gateway.parsers.markers import Markers
from tokenmesh.services.gateway.parsers.parser import ParseContext
from tokenmesh.services.gateway.parsers.tools.headed import copy_headed_arguments
from tokenmesh.services.gateway.parsers.tools.json_calls import CallShape, read_calls
from tokenmesh.services.gateway.parsers.tools.script import Layout, sections, tool_format
from tokenmesh.services.gateway.parsers.tools.stream import CharStream, Script, Steps

_CALLS: Final = "[TOOL_CALLS]"
_CALL_ID: Final = "[CALL_ID]"
_ARGS: Final = "[ARGS]"
_LAYOUT: Final = Layout(calls=(_CALLS,))
_STOPS: Final = Markers(_CALLS)
_NAME: Final = re.compile(r"[\w.:/-]+")
_ID: Final = re.compile(r"[A-Za-z0-9]+")
_AFTER_NAME: Final = Markers(_CALL_ID, _ARGS, "{")
_AFTER_ID: Final = Markers(_ARGS, "{")
_ALPHABET: Final = string.ascii_letters + string.digits
_ID_CHARS: Final = 9


def call_id(seed: str, index: int) -> str:
    """Nine letters and digits for the call at that index of a choice."""
    digest = hashlib.blake2b(f"{index}:{seed}".encode("utf-8", "replace"), digest_size=_ID_CHARS)
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest.digest())


def make_ids(context: ParseContext) -> MakeId:
    """Call ids from the choice's seed."""
    return partial(call_id, context.seed)


def mistral(context: ParseContext) -> Script:
    make_id = make_ids(context)
    shape = CallShape(make_id=make_id)

    def read_call(stream: CharStream) -> Steps[None]:
        first = yield from stream.skip_space()
        if first in ("[", "{"):
            yield from read_calls(stream, shape)
            return
        name, model_id, is_call = yield from _header(stream)
        if not is_call:
            stream.give_back()
            return
        stream.begin_call(name, model_id or make_id(stream.num_calls))
        yield from copy_headed_arguments(stream, _STOPS)

    return sections(_LAYOUT, read_call)


def _header(stream: CharStream) -> Steps[tuple[str, str, bool]]:
    """The name, the id (may be empty), and whether arguments follow."""
    name = yield from stream.read_while(_NAME)
    model_id = ""
    yield from stream.skip_space()
    marker = yield from stream.at(_AFTER_NAME)
    if marker == _CALL_ID:
        stream.take(len(marker))
        model_id = yield from stream.read_while(_ID)
        yield from stream.skip_space()
        marker = yield from stream.at(_AFTER_ID)
    if marker == _ARGS:
        stream.take(len(marker))
    return name, model_id, bool(name and marker)


MISTRAL: Final = tool_format(mistral, make_ids=make_ids)
