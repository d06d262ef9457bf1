"""What the end of a prompt says about the block of reasoning that the answer begins with."""

from collections.abc import Iterable

from tokenmesh.services.gateway.parsers.parser import ParseContext


def is_open(context: ParseContext, starts: Iterable[str], ends: Iterable[str]) -> bool | None:
    """Whether the prompt leaves a block open (True), closes one (False), or says nothing.

    Only what stands at the very end counts, since anything else may be a user's words; in a
    prompt that ends with the model's own, unfinished message the last marker counts.
    """
    starts = tuple(start.strip() for start in starts)
    ends = tuple(end.strip() for end in ends)
    tail = context.prompt_tail.rstrip()
    if context.continues:
        began, ended = max(map(tail.rfind, starts)), max(map(tail.rfind, ends))
        return None if began == ended else began > ended
    if tail.endswith(starts):
        return True
    return False if tail.endswith(ends) else None
