"""Requests that are run to their ends, where nothing else uses the engine meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenmesh.engine.api.tokens import TokenLogprobs
from tokenmesh.engine.core.engine import ABORTED, Engine
from tokenmesh.engine.core.outputs import StepOutput
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import Ending


@dataclass(slots=True)
class FinishedRequest:
    """A request that has ended, and what was delivered of it besides its tokens."""

    request: Request
    ending: Ending
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def token_ids(self) -> list[int]:
        """The output, that of earlier attempts included."""
        return self.request.token_ids[self.request.num_prompt :]


def run_to_end(
    engine: Engine,
    requests: Sequence[Request],
    on_output: Callable[[StepOutput], object] = lambda output: None,
) -> list[FinishedRequest]:
    """Run requests together, in the calling thread; they may end with errors.

    on_output: called after each step. Whatever is raised ends all of them.
    """
    found = {request.key: FinishedRequest(request, ABORTED) for request in requests}
    # Deltas name the stream alone: items of one Pool share theirs, but have none.
    by_stream = {key.stream: each for key, each in found.items()}
    assert len(found) == len(requests), "two requests have one key"
    num_left = len(requests)
    try:
        for request in requests:
            engine.add(request)
        while num_left:
            engine.step()
            output = engine.take_output()
            on_output(output)
            for delta in (each for deltas in output.deltas.values() for each in deltas):
                of_stream = by_stream[delta.stream]
                of_stream.logprobs += delta.logprobs or []
                if delta.prompt_logprobs is not None:
                    of_stream.prompt_logprobs = delta.prompt_logprobs
            for ended in output.ended:
                found[ended.request.key].ending = ended.ending
                num_left -= 1
    except BaseException:
        engine.cancel_all(ABORTED)
        engine.settle()
        engine.take_output()
        raise
    return list(found.values())
