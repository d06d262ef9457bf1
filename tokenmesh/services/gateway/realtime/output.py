"""ResponseOutput: the model's output as items, and the server events that report them."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from tokenmesh.services.gateway.openai.translation import Json
from tokenmesh.services.gateway.parsers.events import (
    CallArguments,
    CallBegin,
    Content,
    Event,
)
from tokenmesh.services.gateway.realtime.conversation import Item, RealtimeConversation
from tokenmesh.shared.ids import new_request_id

_ITEM: Final = {"object": "realtime.item", "status": "in_progress"}


class ResponseOutput:
    """Items of one response in order. Reasoning is omitted: the API has no event for it."""

    def __init__(self, response_id: str, conversation: RealtimeConversation | None) -> None:
        """`conversation`: receives the items, unless None."""
        self.items: list[Item] = []
        self._response_id = response_id
        self._conversation = conversation
        self._previous_id: str | None = None
        self._text: list[str] = []
        self._blank = ""
        self._is_open = False

    def push(self, events: Iterable[Event]) -> Iterator[Json]:
        """Server events for parser events."""
        for event in events:
            if isinstance(event, Content):
                yield from self._push_text(event.text)
            elif isinstance(event, CallBegin):
                yield from self._begin_call(event)
            elif isinstance(event, CallArguments):
                self._text.append(event.text)
                call_id = self.items[-1].view["call_id"]
                yield self._event(
                    "function_call_arguments.delta", call_id=call_id, delta=event.text
                )

    def finish(self, status: str) -> Iterator[Json]:
        """The end of the open item; `status` is `completed` or `incomplete`."""
        if not self._is_open:
            return
        self._is_open = False
        item, text = self.items[-1], "".join(self._text)
        if item.view["type"] == "message":
            yield self._event("output_text.done", content_index=0, text=text)
            part = {"type": "text", "text": text}
            yield self._event("content_part.done", content_index=0, part=part)
            content = [{"type": "output_text", "text": text}]
            item.change(status=status, content=content)
        else:
            view = item.view
            yield self._event(
                "function_call_arguments.done",
                call_id=view["call_id"],
                name=view["name"],
                arguments=text,
            )
            item.change(status=status, arguments=text)
        yield self._item_event("output_item.done", item)
        yield from self._conversation_event("done", item)

    def _push_text(self, text: str) -> Iterator[Json]:
        """White space alone, as between calls, does not begin a message."""
        is_open = self._is_open and self.items[-1].view["type"] == "message"
        if not is_open:
            self._blank += text
            if not text.strip():
                return
            text, self._blank = self._blank, ""
            yield from self._begin_message()
        self._text.append(text)
        yield self._event("output_text.delta", content_index=0, delta=text)

    def _begin_message(self) -> Iterator[Json]:
        yield from self._begin({"type": "message", "role": "assistant", "content": []})
        part = {"type": "text", "text": ""}
        yield self._event("content_part.added", content_index=0, part=part)

    def _begin_call(self, event: CallBegin) -> Iterator[Json]:
        self._blank = ""
        call_id = event.model_id or new_request_id("call")
        call = {"type": "function_call", "name": event.name, "call_id": call_id, "arguments": ""}
        yield from self._begin(call)

    def _begin(self, fields: Json) -> Iterator[Json]:
        yield from self.finish("completed")
        item = Item({"id": new_request_id("item"), **_ITEM, **fields})
        self.items.append(item)
        self._text, self._is_open = [], True
        if self._conversation is not None:
            self._previous_id = self._conversation.append(item)
        yield self._item_event("output_item.added", item)
        yield from self._conversation_event("added", item)

    def _event(self, kind: str, **fields: Any) -> Json:
        return {
            "type": f"response.{kind}",
            "response_id": self._response_id,
            "item_id": self.items[-1].id,
            "output_index": len(self.items) - 1,
            **fields,
        }

    def _item_event(self, kind: str, item: Item) -> Json:
        return {
            "type": f"response.{kind}",
            "response_id": self._response_id,
            "output_index": len(self.items) - 1,
            "item": item.view,
        }

    def _conversation_event(self, kind: str, item: Item) -> Iterator[Json]:
        if self._conversation is not None:
            yield {
                "type": f"conversation.item.{kind}",
                "previous_item_id": self._previous_id,
                "item": item.view,
            }
