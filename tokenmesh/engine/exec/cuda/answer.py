"""Answer: all results of a step for the host, packed into one buffer for one copy."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmesh.engine.api.tokens import TokenLogprobs
from tokenmesh.engine.exec.cuda.batch import Batch, DevicePromptSpan
from tokenmesh.engine.plan import StepResult
from tokenmesh.engine.sampling.device_sampler import DeviceDraws
from tokenmesh.kernels.logprobs import Logprobs


@dataclass(frozen=True, slots=True)
class Answer:
    draws: DeviceDraws | None
    """None when no row draws."""
    prompts: list[tuple[DevicePromptSpan, list[Logprobs]]]
    """Pieces of each span, in order."""

    def parts(self) -> list[torch.Tensor]:
        """All tensors; the only ones of 8 bytes an element come first."""
        parts = []
        if self.draws is not None:
            parts.append(self.draws.drawn)
            parts += [] if self.draws.logprobs is None else _columns(self.draws.logprobs)
        for _, pieces in self.prompts:
            parts += [column for piece in pieces for column in _columns(piece)]
        return parts

    def packed(self) -> torch.Tensor:
        parts = [part.reshape(-1).view(torch.uint8) for part in self.parts()]
        if not parts:
            return torch.empty(0, dtype=torch.uint8)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read(self, host: torch.Tensor, batch: Batch) -> StepResult:
        """The result of a step; host: the copy of `packed`."""
        unread = _unpack(host, self.parts())
        result = StepResult(errors=dict(batch.errors))
        if self.draws is not None:
            drawn, logprobs = unread.pop(0), None
            if self.draws.logprobs is not None:
                logprobs = _take(unread)
            draws = DeviceDraws(drawn, logprobs, self.draws.needs).read(batch.sampled)
            result.errors |= draws.errors
            result.non_retryable |= draws.non_retryable
            for number, draw in draws.draw_by_row.items():
                result.tokens[number] = [draw.token_id]
                if draw.logprobs is not None:
                    result.logprobs[number] = [draw.logprobs]
        for span, pieces in self.prompts:
            taken = [_take(unread) for _ in pieces]
            result.prompt_logprobs[span.row] = _entries(span, taken)
        return result


def _columns(logprobs: Logprobs) -> list[torch.Tensor]:
    return [logprobs.chosen, logprobs.ranks, logprobs.top_ids, logprobs.top]


def _take(unread: list[torch.Tensor]) -> Logprobs:
    chosen, ranks, top_ids, top = (unread.pop(0) for _ in range(4))
    return Logprobs(chosen, ranks, top_ids, top)


def _unpack(host: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    sizes = [part.numel() * part.itemsize for part in like]
    return [
        piece.view(part.dtype).view(part.shape)
        for piece, part in zip(torch.split(host, sizes), like, strict=True)
    ]


def _entries(span: DevicePromptSpan, pieces: list[Logprobs]) -> list[TokenLogprobs]:
    entries: list[TokenLogprobs] = []
    for piece in pieces:
        chosen, ranks, top_ids, top = (column.tolist() for column in _columns(piece))
        targets = span.targets[len(entries) : len(entries) + len(chosen)]
        entries += [
            TokenLogprobs(*entry)
            for entry in zip(targets, chosen, ranks, top_ids, top, strict=True)
        ]
    return entries
