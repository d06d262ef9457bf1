"""Items of an output while the model writes them: text, reasoning, calls of the client's tools."""

from typing import Any, Final, Literal, Protocol

from tokenmesh.services.gateway.openai.shapes import ChatLogprob
from tokenmesh.services.gateway.responses.custom_tools import to_input
from tokenmesh.services.gateway.responses.recorder import EventRecorder

Status = Literal["completed", "incomplete"]

_PART_ADDED: Final = "response.content_part.added"
_PART_DONE: Final = "response.content_part.done"
_ARGUMENTS: Final = "response.function_call_arguments"


class OpenItem(Protocol):
    """Takes text until it is closed."""

    def write(self, text: str) -> None:
        """More of it."""

    def close(self, status: Status) -> None:
        """That was all; `incomplete` when the model had to stop in the middle."""


class OpenMessage:
    """The answer's text."""

    def __init__(self, recorder: EventRecorder, has_logprobs: bool) -> None:
        self._recorder = recorder
        self._id = recorder.make_id("msg")
        self._texts: list[str] = []
        self._logprobs: list[ChatLogprob] = []
        self._has_logprobs = has_logprobs
        item = {"id": self._id, "type": "message", "role": "assistant", "content": []}
        self._index = recorder.add({**item, "status": "in_progress"})
        self._place = {"item_id": self._id, "output_index": self._index, "content_index": 0}
        recorder.emit(_PART_ADDED, self._place, part=self._part())

    def write(self, text: str, logprobs: list[ChatLogprob] | None = None) -> None:
        """See `OpenItem`."""
        self._texts.append(text)
        self._logprobs.extend(logprobs or ())
        emit = self._recorder.emit
        emit("response.output_text.delta", self._place, delta=text, logprobs=logprobs or [])

    def close(self, status: Status) -> None:
        """See `OpenItem`."""
        part = self._part()
        emit = self._recorder.emit
        emit(
            "response.output_text.done",
            self._place,
            text=part["text"],
            logprobs=part["logprobs"] or [],
        )
        emit(_PART_DONE, self._place, part=part)
        self._recorder.finish(self._index, content=[part], status=status)

    def _part(self) -> dict[str, Any]:
        logprobs = list(self._logprobs) if self._has_logprobs else None
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class OpenReasoning:
    """What the model thinks."""

    def __init__(self, recorder: EventRecorder) -> None:
        self._recorder = recorder
        self._id = recorder.make_id("rs")
        self._texts: list[str] = []
        item = {"id": self._id, "type": "reasoning", "summary": [], "content": []}
        self._index = recorder.add({**item, "encrypted_content": None, "status": "in_progress"})
        self._place = {"item_id": self._id, "output_index": self._index, "content_index": 0}
        recorder.emit(_PART_ADDED, self._place, part=self._part())

    def write(self, text: str) -> None:
        """See `OpenItem`."""
        self._texts.append(text)
        self._recorder.emit("response.reasoning_text.delta", self._place, delta=text)

    def close(self, status: Status) -> None:
        """See `OpenItem`."""
        part = self._part()
        emit = self._recorder.emit
        emit("response.reasoning_text.done", self._place, text=part["text"])
        emit(_PART_DONE, self._place, part=part)
        self._recorder.finish(self._index, content=[part], status=status)

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self._texts)}


class OpenFunctionCall:
    """A call that the client is to make."""

    def __init__(self, recorder: EventRecorder, name: str, call_id: str) -> None:
        self._recorder = recorder
        self._id = recorder.make_id("fc")
        self._texts: list[str] = []
        item = {"id": self._id, "type": "function_call", "call_id": call_id, "name": name}
        self._index = recorder.add({**item, "arguments": "", "status": "in_progress"})
        self._place = {"item_id": self._id, "output_index": self._index}

    def write(self, text: str) -> None:
        """See `OpenItem`."""
        self._texts.append(text)
        self._recorder.emit(f"{_ARGUMENTS}.delta", self._place, delta=text)

    def close(self, status: Status) -> None:
        """See `OpenItem`."""
        arguments = "".join(self._texts)
        name = self._recorder.output[self._index]["name"]
        done = {"name": name, "arguments": arguments}
        self._recorder.emit(f"{_ARGUMENTS}.done", self._place, **done)
        self._recorder.finish(self._index, arguments=arguments, status=status)


class OpenCustomCall:
    """The same for a tool that takes free text: known when its arguments are complete."""

    def __init__(self, recorder: EventRecorder, name: str, call_id: str) -> None:
        self._recorder = recorder
        self._id = recorder.make_id("ctc")
        self._texts: list[str] = []
        item = {"id": self._id, "type": "custom_tool_call", "call_id": call_id, "name": name}
        self._index = recorder.add({**item, "input": "", "status": "in_progress"})

    def write(self, text: str) -> None:
        """See `OpenItem`."""
        self._texts.append(text)

    def close(self, status: Status) -> None:
        """See `OpenItem`."""
        text = to_input("".join(self._texts))
        place = {"item_id": self._id, "output_index": self._index}
        if text:
            self._recorder.emit("response.custom_tool_call_input.delta", place, delta=text)
        self._recorder.emit("response.custom_tool_call_input.done", place, input=text)
        self._recorder.finish(self._index, input=text, status=status)
