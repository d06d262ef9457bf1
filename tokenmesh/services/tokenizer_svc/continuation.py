"""continue_final_message: render a conversation open-ended, cut where its last message ends.

As in transformers: a mark is appended to the last message, and the rendering is cut at it.
"""

from typing import Final

from tokenmesh.services.tokenizer_svc.render_job import JsonObject

_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "


class CannotContinue(Exception):
    """The last message has no text, or the template does not print it as it is."""


def mark_end(messages: list[JsonObject], template: str) -> str:
    """Append the mark to the last message, in place; returns its text without the mark."""
    if not messages or "content" not in template:
        raise CannotContinue("continue_final_message: the template does not print any content")
    final = messages[-1]
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = content + _MARK
        return content
    texts = [part for part in content if "text" in part] if isinstance(content, list) else []
    if not texts:
        raise CannotContinue("continue_final_message: the final message has no text to continue")
    text = str(texts[-1]["text"])
    texts[-1]["text"] = text + _MARK
    return text


def cut_at_mark(rendered: str, final_text: str) -> str:
    """The rendering up to where the last message's text ends."""
    if final_text.strip() not in rendered or _MARK.strip() not in rendered:
        raise CannotContinue(
            "continue_final_message: the template does not print the final message as it is, "
            "so there is no place to continue from"
        )
    place = rendered.rindex(_MARK.strip())
    if rendered[place : place + len(_MARK)] == _MARK:
        return rendered[:place]
    # The template trimmed the message, so the spaces before the mark are not its own either.
    return rendered[:place].rstrip()
