"""Dialogs as training batches: rendered, tokenized, batched by length, answers marked for loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from scripts.demo_model.arithmetic import drill
from scripts.demo_model.mixture import Dialog, make_dialog, make_text
from scripts.demo_model.rendering import ChatTemplate
from scripts.demo_model.tokenizer import CONTEXT_LENGTH, END_OF_TEXT, MARKS

_BATCH_TOKENS = 2048
_GAP_CHANCE = 0.15
_TOOLS_PUT_OFF = 0.8
_TEXT_SHARE = 0.025
_DRILL_SHARE = 0.08
_COPY_DRILL_SHARE = 0.06
_COPY_DRILL_TOKENS = 160


@dataclass(frozen=True, slots=True)
class Sample:
    """A tokenized dialog; `learned[i]` says whether token i is the model's to predict."""

    ids: list[int]
    learned: list[bool]
    positions: list[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples side by side, [rows, length], padded on the right: causal attention needs no mask."""

    ids: torch.Tensor
    positions: torch.Tensor
    learned: torch.Tensor


class SampleMaker:
    """Turns dialogs into samples with one tokenizer and the shipped chat template."""

    def __init__(self, tokenizer: Tokenizer, template: Path) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(template)
        self._start = self._encode("<|im_start|>assistant\n")
        self._end = self._encode("<|im_end|>")[0]
        self._newline = self._encode("\n")[0]
        special = {self._encode(token)[0] for token in MARKS}
        self._ordinary = [i for i in range(tokenizer.get_vocab_size()) if i not in special]
        self._end_of_text = self._encode(END_OF_TEXT)[0]
        self._empty_thought = self._encode("<think>\n\n</think>\n\n")

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _answers(self, ids: list[int]) -> list[tuple[int, int]]:
        """The half-open ranges of what the model says, its end-of-turn token included."""
        ranges, width = [], len(self._start)
        at = 0
        while at < len(ids):
            if ids[at : at + width] != self._start:
                at += 1
                continue
            first = at + width
            if ids[first : first + len(self._empty_thought)] == self._empty_thought:
                first += len(self._empty_thought)
            at = ids.index(self._end, first) + 1
            ranges.append((first, at))
        return ranges

    def __call__(self, rng: Random, dialog: Dialog) -> Sample:
        """`dialog` as tokens, at positions that now and then jump ahead between turns."""
        ids = self._encode(self._template.render(dialog))
        answers = self._answers(ids)
        if dialog.enable_thinking:
            answers = answers[-1:]  # the template drops the thoughts of earlier turns
        learned = [False] * len(ids)
        for first, end in answers:
            learned[first:end] = [True] * (end - first)
        return Sample(ids, learned, self._positions(rng, ids))

    def plain_text(self, text: str) -> Sample:
        """A text outside any dialog, learned whole, closed by the end of text."""
        ids = [*self._encode(text), self._end_of_text]
        return Sample(ids, [True] * len(ids), list(range(len(ids))))

    def drill(self, lines: list[tuple[str, str]]) -> Sample:
        """Lines outside any dialog, of which only the second parts are learned."""
        ids: list[int] = []
        learned: list[bool] = []
        for given, result in lines:
            for text, is_learned in ((given, False), (result, True)):
                tokens = self._encode(text)
                ids += tokens
                learned += [is_learned] * len(tokens)
        return Sample(ids, learned, list(range(len(ids))))

    def copy_drill(self, rng: Random) -> Sample:
        """Any tokens at all, and the same again: copying must not depend on what is copied."""
        ids: list[int] = []
        learned: list[bool] = []
        while len(ids) < _COPY_DRILL_TOKENS:
            length = rng.randint(2, 20)
            piece = [*rng.choices(self._ordinary, k=length), self._newline]
            ids += piece * 2
            learned += [False] * len(piece) + [True] * len(piece)
        return Sample(ids, learned, list(range(len(ids))))

    def _positions(self, rng: Random, ids: list[int]) -> list[int]:
        room = CONTEXT_LENGTH - len(ids)
        if room <= 0 or rng.random() > _GAP_CHANCE:
            return list(range(len(ids)))
        at = rng.randrange(len(ids))
        gap = int(room * rng.random() ** 2)
        return [index + (gap if index >= at else 0) for index in range(len(ids))]


def _to_batch(samples: list[Sample]) -> Batch:
    length = max(len(sample.ids) for sample in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    positions, learned = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, sample in enumerate(samples):
        span = slice(0, len(sample.ids))
        ids[row, span] = torch.tensor(sample.ids)
        positions[row, span] = torch.tensor(sample.positions)
        learned[row, span] = torch.tensor(sample.learned)
    return Batch(ids, positions, learned)


def _groups(samples: list[Sample]) -> Iterator[list[Sample]]:
    """Samples of similar length, at most _BATCH_TOKENS a group with the padding counted."""
    group: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: len(sample.ids)):
        if group and len(sample.ids) * (len(group) + 1) > _BATCH_TOKENS:
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def _draw(rng: Random, make: SampleMaker, easy: bool) -> Sample:
    """A sample; the long dialogs with tools are mostly put off while practice is to be easy."""
    if rng.random() < _TEXT_SHARE:
        return make.plain_text(make_text(rng))
    if rng.random() < _DRILL_SHARE:
        return make.drill(drill(rng))
    if rng.random() < _COPY_DRILL_SHARE:
        return make.copy_drill(rng)
    while True:
        dialog = make_dialog(rng)
        if not (easy and dialog.tools and rng.random() < _TOOLS_PUT_OFF):
            return make(rng, dialog)


def batches(rng: Random, make: SampleMaker, dialogs: int, easy_steps: int) -> Iterator[list[Batch]]:
    """Endless steps of `dialogs` dialogs each, as batches of similar length, easy ones first."""
    for step in count():
        samples = [_draw(rng, make, step < easy_steps) for _ in range(dialogs)]
        fitting = [sample for sample in samples if len(sample.ids) <= CONTEXT_LENGTH]
        yield [_to_batch(group) for group in _groups(fitting)]
