"""The training loop: Muon for the layers, AdamW for the rest, a steady rate and a linear end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import torch
from transformers import LlamaForCausalLM

from scripts.demo_model.network import loss_of
from scripts.demo_model.packing import Batch, SampleMaker, batches

_WARM_UP_STEPS = 40
_STEADY_SHARE = 0.7  # of the steps; then the rate falls in a line to zero
_GRADIENT_NORM = 1.0
_REPORT_EVERY = 50  # steps
_LAYER_RATE, _EMBEDDING_RATE, _OTHER_RATE = 3e-3, 5e-3, 1.5e-3


@dataclass(frozen=True, slots=True)
class Recipe:
    """Determines the result; `minutes` only brings the end of a slow run forward.

    `rate` is a factor of all learning rates.
    """

    seed: int
    steps: int
    rate: float
    minutes: float
    dialogs_per_step: int
    easy_steps: int
    device: str


class Schedule:
    """The share of the peak rate by step: warm-up, steady, and a linear end.

    When the time is nearly used up the end begins early; `steps` then says how long a run it has
    become, and a run of that many steps has the same rates.
    """

    def __init__(self, steps: int, minutes: float) -> None:
        self.steps = steps
        self._steady_until = time.monotonic() + 60 * minutes * _STEADY_SHARE

    def rate(self, step: int) -> float:
        """For `step` (from 0); zero when the run is over."""
        if step < self._steady_steps and time.monotonic() > self._steady_until:
            self.steps = math.ceil(step / _STEADY_SHARE)
        left = (self.steps - step) / max(1, self.steps - self._steady_steps)
        return max(0.0, min(1.0, (step + 1) / _WARM_UP_STEPS, left))

    @property
    def _steady_steps(self) -> int:
        return int(self.steps * _STEADY_SHARE)


def _optimizers(network: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    matrices = [p for p in network.model.layers.parameters() if p.ndim == 2]
    embeddings = network.model.embed_tokens.weight
    chosen = {id(p) for p in [*matrices, embeddings]}
    others = [p for p in network.parameters() if id(p) not in chosen]
    groups = [
        {"params": [embeddings], "lr": _EMBEDDING_RATE},
        {"params": others, "lr": _OTHER_RATE},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices, lr=_LAYER_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, 0.98), fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def _move(batch: Batch, device: str) -> Batch:
    return replace(
        batch,
        ids=batch.ids.to(device),
        positions=batch.positions.to(device),
        learned=batch.learned.to(device),
    )


def _backward(network: LlamaForCausalLM, step: list[Batch], device: str) -> float:
    """Accumulate the gradient of the mean loss over all the step's batches; return that mean."""
    tokens, total = sum(int(batch.learned.sum()) for batch in step), 0.0
    for batch in step:
        loss = loss_of(network, _move(batch, device)) / tokens
        torch.autograd.backward(loss)
        total += loss.item()
    return total


def train(
    network: LlamaForCausalLM,
    make: SampleMaker,
    recipe: Recipe,
    every_so_often: Callable[[int], None],
) -> int:
    """Train in place, calling `every_so_often` with each step's number; return the steps taken."""
    optimizers, schedule = _optimizers(network), Schedule(recipe.steps, recipe.minutes)
    steps = batches(Random(recipe.seed), make, recipe.dialogs_per_step, recipe.easy_steps)
    started, seen, smooth = time.monotonic(), 0, math.nan
    for number, batch in enumerate(steps):
        share = schedule.rate(number)
        if share == 0:
            return number
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * share * recipe.rate
        loss = _backward(network, batch, recipe.device)
        torch.nn.utils.clip_grad_norm_(network.parameters(), _GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += sum(part.ids.numel() for part in batch)
        smooth = loss if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss
        if number % _REPORT_EVERY == 0:
            minutes = f"{(time.monotonic() - started) / 60:5.1f} min"
            print(f"{minutes}  step {number:5d}  loss {smooth:.4f}  tokens {seen:,}", flush=True)
        every_so_often(number)
    raise AssertionError("the stream of batches never ends")
