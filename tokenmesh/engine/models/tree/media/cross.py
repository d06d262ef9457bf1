"""Cross attention of a decoder: each row reads all states that an encoder has computed for it.

Keys and values are written once, when a row begins; no other row shares them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from tokenmesh.engine.layers.step import HostStep
from tokenmesh.engine.models.alignment import RowAlignments, read_heads
from tokenmesh.engine.models.api import ModelFacts
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.models.tree.run import ModulePlace, Run

DECODERS: Final = {"WhisperForConditionalGeneration": "WhisperForCausalLM"}
"""Encoder-decoder architectures: transformers' class of the decoder with its head."""
ENCODERS: Final = {"WhisperForConditionalGeneration": "model.encoder."}
"""It holds what the names of tensors begin with that another service loads."""


NUM_PROMPTS: Final = 2
"""This is the number of prompts of the check."""


@dataclass(slots=True)
class CrossPort:
    """One cross attention module and its pages."""

    module: Any
    run: Run
    length: int
    """States of the encoder."""
    layer: int = 0
    place: ModulePlace | None = None

    @property
    def heads(self) -> int:
        return int(self.module.num_heads)

    @property
    def head_dim(self) -> int:
        return int(self.module.head_dim)

    def forward(self, hidden: torch.Tensor, **_named: Any) -> tuple[torch.Tensor, None]:
        """hidden [1, T, H] -> the same shape; in place of the module's own forward."""
        query = (self.module.q_proj(hidden[0]) * self.module.scaling).unflatten(
            -1, (self.heads, -1)
        )
        step, mixed = self.run.step, query
        if step is not None:  # else only shapes count: the probe
            assert self.place is not None
            assert isinstance(step, HostStep)
            mixed = cross_attention(query, self.place.tensor, step, self._note)
        return self.module.out_proj(mixed.flatten(1))[None], None

    def _note(self, number: int, weights: torch.Tensor) -> None:
        if self.run.alignments is not None:
            self.run.alignments.add(number, self.layer, weights)

    def write(self, states: torch.Tensor, store: KvStore, row: int) -> None:
        """states [length, H]: keys and values of a row."""
        assert self.place is not None
        pages = store.layers[self.place.layer][self.place.item][row]
        for page, project in zip(pages, (self.module.k_proj, self.module.v_proj), strict=True):
            page.copy_(project(states).unflatten(-1, (self.heads, -1)).transpose(0, 1))


def cross_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    step: HostStep,
    note: Callable[[int, torch.Tensor], None],
) -> torch.Tensor:
    """query [T, heads, D] scaled, pages [rows, 2, heads, length, D] -> [T, heads, D].

    `note` receives the weights [heads, tokens, length] of each row.
    """
    mixed, first = torch.empty_like(query), 0
    for number, count in zip(step.numbers, step.counts, strict=True):
        keys, values = pages[number]
        tokens = slice(first, first + count)
        scores = query[tokens].transpose(0, 1) @ keys.transpose(1, 2)
        weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
        note(number, weights)
        mixed[tokens] = (weights @ values).transpose(0, 1)
        first += count
    return mixed


def wrap_cross(body: Any, run: Run) -> list[CrossPort]:
    """Replace a decoder's cross attention; nothing happens for a tree without one."""
    if type(body).__name__ != "WhisperDecoderWrapper":
        return []
    decoder, config = body.decoder, body.config
    ports = [
        CrossPort(layer.encoder_attn, run, config.max_source_positions, number)
        for number, layer in enumerate(decoder.layers)
    ]
    for port in ports:
        port.module.forward = port.forward

    def forward(
        inputs_embeds: torch.Tensor, position_ids: torch.Tensor, past_key_values: Any, **named: Any
    ) -> Any:
        """With any tensor as encoder states: without, the layers leave cross attention out."""
        return decoder(
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            past_key_values=past_key_values,
            encoder_hidden_states=inputs_embeds,
            **named,
        )

    body.forward = forward
    return ports


def take_alignment_heads(ports: list[CrossPort], run: Run, directory: Path, config: Any) -> None:
    """Record the heads that follow the speech, where the checkpoint names them."""
    if ports and (heads := read_heads(directory, len(ports), ports[0].heads)):
        run.alignments = RowAlignments(config.median_filter_width, heads)


def states_for_check(
    facts: ModelFacts, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Return what an encoder could have computed for each prompt of the check; empty without
    one.
    """
    generator = torch.Generator().manual_seed(1)
    shape = (facts.encoder_states, facts.hidden_size)
    prompts = range(NUM_PROMPTS if facts.encoder_states else 0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in prompts]
