"""The training loop: Muon for the matrices, AdamW for the rest, warm-up and cosine."""

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
_LAST_RATE = 0.01  # of the peak
_GRADIENT_NORM = 1.0
_EASY_SHARE = 0.2  # of the steps
_REPORT_EVERY = 50  # steps


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides the result. `minutes` cuts the schedule short on a slow machine."""

    seed: int
    steps: int
    minutes: float
    dialogs_per_step: int
    rate: float
    device: str


def _optimizers(network: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    matrices = [p for p in network.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in network.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.98), fused=True),
    ]


def _rate_at(step: int, progress: float) -> float:
    """The share of the peak rate: linear warm-up, then a cosine down to _LAST_RATE."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return min(1.0, (step + 1) / _WARM_UP_STEPS) * (_LAST_RATE + (1 - _LAST_RATE) * cosine)


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
    optimizers = _optimizers(network, recipe.rate)
    easy = int(recipe.steps * _EASY_SHARE)
    steps = batches(Random(recipe.seed), make, recipe.dialogs_per_step, easy)
    started, seen, smooth = time.monotonic(), 0, math.nan
    for number, batch in enumerate(steps):
        elapsed = (time.monotonic() - started) / 60
        progress = max(number / recipe.steps, elapsed / recipe.minutes)
        if progress >= 1:
            return number
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate * _rate_at(number, progress)
        loss = _backward(network, batch, recipe.device)
        torch.nn.utils.clip_grad_norm_(network.parameters(), _GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += sum(part.ids.numel() for part in batch)
        smooth = loss if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss
        if number % _REPORT_EVERY == 0:
            minutes = f"{elapsed:5.1f} min"
            print(f"{minutes}  step {number:5d}  loss {smooth:.4f}  tokens {seen:,}", flush=True)
        every_so_often(number)
    raise AssertionError("the stream of batches never ends")
