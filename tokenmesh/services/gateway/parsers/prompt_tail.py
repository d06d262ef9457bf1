"""What the end of a prompt says about the block of reasoning that the answer begins with."""

from tokenmesh.services.gateway.parsers.parser import ParseContext


def is_open(context: ParseContext, start: str, end: str) -> bool | None:
    """Whether the prompt leaves a block open (True), closes one (False), or says nothing.

    Only what stands at the very end counts, since anything else may be a user's words; in a
    prompt that ends with the model's own, unfinished message the last marker counts.
    """
    tail = context.prompt_tail.rstrip()
    if context.continues:
        began, ended = tail.rfind(start), tail.rfind(end)
        return None if began == ended else began > ended
    if tail.endswith(start):
        return True
    return False if tail.endswith(end) else None
