"""Positions of a prompt of an omni model: text, images, recordings, and videos with their sound.

The rule is that of `get_rope_index` of transformers, which finds items by the tokens around them.
Here they are known, so that a prompt of many items takes microseconds for each of them. Sums are
those of transformers, in float32: times between frames need not be whole numbers.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from tokenmesh.engine.api.media import IMAGE, VIDEO, MediaItem

OMNI: Final = ("qwen3_omni_moe_thinker",)
"""Model types."""
_ROWS: Final = 3
"""Time, height, width."""
_SECONDS: Final = "video_second_per_grid"


def omni_positions(
    config: Any, token_ids: Sequence[int], media: Sequence[MediaItem]
) -> torch.Tensor:
    """float32 [3, T]. Raises ValueError where a grid does not fit the tokens of its item."""
    placed = _Placed(torch.empty(_ROWS, len(token_ids)))
    if any(item.kind in (IMAGE, VIDEO) for item in media):
        for number, item in enumerate(media):
            around = 2 if _has_sound(config, token_ids, item) else 1
            placed.count_to(item.offset - around)
            placed.count_to(item.offset)
            if placed.num_tokens != item.offset:
                raise ValueError(f"the {item.kind} at token {item.offset} lies in another item")
            placed.put(_of_item(config, token_ids, item, placed.next))
            after = media[number + 1].offset if number + 1 < len(media) else len(token_ids)
            placed.put(placed.counted(min(item.end + around, after)))
    placed.count_to(len(token_ids))
    return placed.positions


class _Placed:
    """Positions of the first tokens of a prompt."""

    def __init__(self, positions: torch.Tensor) -> None:
        self.positions = positions
        self.num_tokens = 0
        self.next = torch.zeros(())
        """One more than the greatest position."""

    def counted(self, end: int) -> torch.Tensor:
        """Positions [3, n] of the tokens before `end` one after the other; n may be 0."""
        count = max(0, end - self.num_tokens)
        return (torch.arange(count) + self.next).expand(_ROWS, -1)

    def count_to(self, end: int) -> None:
        """Place the tokens before `end` one after the other."""
        found, start = self.counted(end), self.next
        self.put(found)
        self.next = start + found.shape[1]

    def put(self, found: torch.Tensor) -> None:
        """Place the next tokens at positions [3, n]."""
        end = self.num_tokens + found.shape[1]
        if end > self.positions.shape[1]:
            raise ValueError("the grids of media are longer than the prompt")
        self.positions[:, self.num_tokens : end] = found
        self.num_tokens = end
        if found.numel():
            self.next = found.max() + 1


def _has_sound(config: Any, token_ids: Sequence[int], item: MediaItem) -> bool:
    """Return whether an item is a video with its sound between the frames."""
    ids = token_ids[item.offset : item.end]
    return item.kind == VIDEO and config.audio_token_id in ids


def _of_item(
    config: Any, token_ids: Sequence[int], item: MediaItem, start: torch.Tensor
) -> torch.Tensor:
    if item.kind not in (IMAGE, VIDEO):
        return (torch.arange(item.length) + start).expand(_ROWS, -1)
    merge = config.vision_config.spatial_merge_size
    if len(item.grid) != _ROWS:
        raise ValueError(f"the grid of the {item.kind} is {item.grid}")
    frames, height, width = (item.grid[0], item.grid[1] // merge, item.grid[2] // merge)
    seconds = torch.tensor(item.facts.get(_SECONDS, 1.0) if item.kind == VIDEO else 1.0)
    times = torch.arange(frames) * seconds * config.position_id_per_seconds
    seen = torch.stack(
        [
            each.expand(frames, height, width).flatten().float()
            for each in (times[:, None, None], torch.arange(height)[:, None], torch.arange(width))
        ]
    )
    seen = seen + start
    ids = torch.tensor(token_ids[item.offset : item.end])
    is_sound = ids == config.audio_token_id
    heard = (torch.arange(int(is_sound.sum())) + start).expand(_ROWS, -1)
    both = torch.cat([seen, heard], dim=1)
    if both.shape[1] != item.length:
        raise ValueError(f"the grid of the {item.kind} has {seen.shape[1]} tokens")
    # frames come before the sound of the same time
    order = both[0].argsort(stable=True)
    if not torch.equal(order >= seen.shape[1], is_sound):
        raise ValueError("frames and sound of the video are not in the order of their times")
    return both[:, order]
