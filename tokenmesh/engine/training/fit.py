"""fit: answers of a model -> the weights of an EAGLE-3 head, as a checkpoint."""

import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.native.decoder import Decoder
from tokenmesh.engine.training.answers import LearnedText
from tokenmesh.engine.training.eagle3 import HeadSizes, TrainedHead
from tokenmesh.shared.clock import monotonic_s
from tokenmesh.shared.errors import ConfigError

logger = logging.getLogger(__name__)

_LATER: Final = 0.8
"""It holds what a step's loss counts of that of the step before."""
_WARM_UP: Final = 0.05
_DECAY: Final = 0.01
_HELD_OUT: Final = 32
"""One sequence of so many is not learned from; what the head guesses of those is logged."""
_BATCH_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class FitSettings:
    """It says how long a head learns, and what it can draft."""

    steps: int = 3
    """Tokens ahead that it learns to guess."""
    num_tokens: int = 4096
    """The most frequent tokens of the answers, which it can draft; the others it cannot."""
    epochs: int = 3
    rate: float = 1e-3
    max_length: int = 512
    """Tokens of a sequence that are learned from."""


@dataclass(slots=True)
class _Sequence:
    token_ids: torch.Tensor
    num_prompt: int
    taps: torch.Tensor
    """bfloat16 [T, taps * H]"""
    final: torch.Tensor
    """bfloat16 [T, H]"""


class Fit:
    """One head in the making."""

    def __init__(self, runner: TorchRunner, directory: Path, settings: FitSettings) -> None:
        """directory: of the model's checkpoint. Raises ConfigError for a model whose layers are not
        those of a decoder of the native kind."""
        model = runner.model
        if not isinstance(model, Decoder):
            raise ConfigError("heads are fitted to models of the native kind", param="model")
        self._runner = runner
        self._model = model
        self._settings = settings
        self._directory = directory
        depth = len(model.config.layers)
        self.taps = (2, depth // 2, depth - 3)
        config, rope = model.config, model.config.ropes[0]
        if depth < 6 or rope.kind != "default" or config.activation != "silu":
            what = "with less than 6 layers, a scaled rope, or another activation than silu"
            raise ConfigError(f"no head is fitted to a model {what}", param="model")
        self._sizes = HeadSizes(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope_theta=rope.theta,
            rms_norm_eps=config.rms_norm_eps,
            num_taps=len(self.taps),
            num_tokens=min(settings.num_tokens, config.vocab_size),
        )

    def run(self, answers: Sequence[LearnedText]) -> Iterator[tuple[TrainedHead, torch.Tensor]]:
        """After each epoch the head, and the ids [D] of what it drafts.

        The first epochs look fewer tokens ahead: what comes later builds on them."""
        ids = self._frequent(answers)
        sequences = self._sequences(answers)
        held = sequences[::_HELD_OUT]
        learned = [each for n, each in enumerate(sequences) if n % _HELD_OUT]
        head, table, rows = self._begin(ids)
        total = max(1, self._settings.epochs * sum(1 for _ in _batches(learned, 0)))
        optimizer = torch.optim.AdamW(
            head.parameters(), lr=self._settings.rate, betas=(0.9, 0.95), weight_decay=_DECAY
        )
        done, began_s = 0, monotonic_s()
        for epoch in range(self._settings.epochs):
            seen = 0.0
            for batch in _batches(learned, epoch):
                rate = _rate_at(done / total) * self._settings.rate
                for group in optimizer.param_groups:
                    group["lr"] = rate
                steps = min(self._settings.steps, epoch + 1)
                loss = self._loss(head, table, rows, batch, steps)
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                done, seen = done + 1, seen + loss.item()
                if done % 20 == 0:
                    logger.info("step %d of %d, loss %.3f", done, total, loss.item())
            rates = self._rates(head, table, rows, held)
            logger.info(
                "epoch %d of %d, %.0f s: mean loss %.3f; of held-out answers it guesses %s",
                epoch + 1,
                self._settings.epochs,
                monotonic_s() - began_s,
                seen * self._settings.epochs / total,
                ", ".join(f"{each:.3f}" for each in rates),
            )
            yield head, ids

    def _frequent(self, answers: Sequence[LearnedText]) -> torch.Tensor:
        counts = Counter(token for each in answers for token in each.output)
        more = Counter(token for each in answers for token in each.prompt)
        ranked = [token for token, _ in counts.most_common()]
        ranked += [token for token, _ in more.most_common() if token not in counts]
        known = set(ranked)
        ranked += [token for token in range(self._model.config.vocab_size) if token not in known]
        return torch.tensor(sorted(ranked[: self._sizes.num_tokens]))

    def _sequences(self, answers: Sequence[LearnedText]) -> list[_Sequence]:
        found, began_s = [], monotonic_s()
        for each in answers:
            ids = [*each.prompt, *each.output][: self._settings.max_length]
            if len(ids) < len(each.prompt) + 4:
                continue
            final, taps = self._runner.states(ids, self.taps)
            found.append(
                _Sequence(
                    torch.tensor(ids),
                    len(each.prompt),
                    taps.flatten(1).to(torch.bfloat16),
                    final.to(torch.bfloat16),
                )
            )
        if len(found) < 2:
            raise ConfigError("there are too few answers to learn from", param="texts")
        count = sum(len(each.token_ids) for each in found)
        logger.info("states of %d tokens in %.0f s", count, monotonic_s() - began_s)
        return found

    def _begin(self, ids: torch.Tensor) -> tuple[TrainedHead, torch.Tensor, torch.Tensor]:
        """A head that starts from the model's last layer; embeddings [V, H]; the rows [D, H] of the
        model's own head."""
        config, last = self._model.config, len(self._model.config.layers) - 1
        torch.manual_seed(0)
        head = TrainedHead(self._sizes)
        table = self._model.embed(torch.arange(config.vocab_size)).float()
        rows = _rows_of(self._model, ids)
        layer = {}
        with torch.inference_mode():
            checkpoint = Checkpoint(self._directory)
            if self._model.facts.quantization is not None:
                checkpoint.decode(self._model.facts.quantization)
            prefix = f"model.layers.{last}."
            for name, shape in checkpoint.shapes().items():
                if name.startswith(prefix) and name.endswith("weight"):
                    layer[name.removeprefix(prefix)] = checkpoint.take(name, shape, torch.float32)
            norm = checkpoint.take("model.norm.weight", (config.hidden_size,), torch.float32)
        head.begin_as({name: each.clone() for name, each in layer.items()}, norm.clone())
        with torch.no_grad():
            head.lm_head.weight.copy_(rows)
        return head, table.clone(), rows

    def _loss(
        self,
        head: TrainedHead,
        table: torch.Tensor,
        rows: torch.Tensor,
        batch: list[_Sequence],
        steps: int,
    ) -> torch.Tensor:
        tokens, taps, wanted, mask = _stacked(batch, table, rows, steps)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = head.losses(tokens, taps, [wanted] * steps)
        count = mask.sum()
        parts = [_LATER**n * (each * mask).sum() / count for n, each in enumerate(losses)]
        return torch.stack(parts).sum()

    @torch.no_grad()
    def _rates(
        self, head: TrainedHead, table: torch.Tensor, rows: torch.Tensor, held: list[_Sequence]
    ) -> list[float]:
        """Return how often each step guesses the model's most likely token, the steps before it
        too.
        """
        right = torch.zeros(self._settings.steps)
        count = 0.0
        for batch in _batches(held, 0):
            tokens, taps, wanted, mask = _stacked(batch, table, rows, self._settings.steps)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                guesses = head.guesses(tokens, taps, self._settings.steps)
            kept = mask.clone()
            for step, each in enumerate(guesses):
                agrees = each.argmax(-1) == wanted.argmax(-1)
                if step:
                    # a chain goes on from where the step before it was right
                    kept = torch.nn.functional.pad(kept, (1, 0))[:, :-1] * mask
                kept = kept * agrees
                right[step] += kept.sum()
            count += float(mask.sum())
        return (right / max(count, 1.0)).tolist()


def _stacked(
    batch: list[_Sequence], table: torch.Tensor, rows: torch.Tensor, steps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings of the token after each position [B, T, H], states there [B, T, taps * H], the
    probabilities of the token two behind [B, T, D], and where it is part of an answer [B, T]."""
    length = max(len(each.token_ids) for each in batch) - 2
    tokens = torch.zeros(len(batch), length, table.shape[1])
    taps = torch.zeros(len(batch), length, batch[0].taps.shape[1])
    final = torch.zeros(len(batch), length, batch[0].final.shape[1])
    mask = torch.zeros(len(batch), length)
    for row, each in enumerate(batch):
        count = len(each.token_ids) - 2
        tokens[row, :count] = table[each.token_ids[1 : count + 1]]
        taps[row, :count] = each.taps[:count]
        final[row, :count] = each.final[1 : count + 1]
        mask[row, max(0, each.num_prompt - 2 + steps - 1) : count] = 1.0
    wanted = (final @ rows.T).softmax(-1)
    return tokens, taps, wanted, mask


def _batches(sequences: Sequence[_Sequence], seed: int) -> Iterator[list[_Sequence]]:
    """Sequences of about the same length, in some order."""
    generator = torch.Generator().manual_seed(seed)
    ordered = [sequences[n] for n in torch.randperm(len(sequences), generator=generator).tolist()]
    ordered.sort(key=lambda each: len(each.token_ids))
    batches, batch, longest = [], list[_Sequence](), 0
    for each in ordered:
        longest = max(longest, len(each.token_ids))
        if batch and longest * (len(batch) + 1) > _BATCH_TOKENS:
            batches.append(batch)
            batch, longest = [], len(each.token_ids)
        batch.append(each)
    batches.append(batch)
    return (batches[n] for n in torch.randperm(len(batches), generator=generator).tolist())


def _rate_at(share: float) -> float:
    """Return the value of the rate, after that share of the steps."""
    if share < _WARM_UP:
        return share / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (share - _WARM_UP) / (1 - _WARM_UP)))


def _rows_of(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Rows [D, H] of the model's head: its logits of each feature alone."""
    hidden = model.config.hidden_size
    found = torch.empty(len(ids), hidden)
    with torch.inference_mode():
        for first in range(0, hidden, 64):
            some = torch.eye(hidden, dtype=model.dtype)[first : first + 64].contiguous()
            found[:, first : first + 64] = model.logits(some)[:, ids].T
    return found.clone()


def save(
    head: TrainedHead, ids: torch.Tensor, runner: TorchRunner, taps: Sequence[int], to: Path
) -> None:
    """Write a checkpoint with the names of EAGLE-3's."""
    sizes, facts = head.sizes, runner.model.facts
    to.mkdir(parents=True, exist_ok=True)
    tensors = {name: each.detach().to(torch.bfloat16).contiguous() for name, each in
               head.state_dict().items()}  # fmt: skip
    tensors["d2t"] = ids - torch.arange(len(ids))
    is_drafted = torch.zeros(facts.vocab_size, dtype=torch.bool)
    is_drafted[ids] = True
    tensors["t2d"] = is_drafted
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
        "max_position_embeddings": facts.max_position,
        "hidden_act": "silu",
        "vocab_size": facts.vocab_size,
        "draft_vocab_size": len(ids),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(taps),
    }
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
