"""A request through a decoder as a GPU would run it: every op but the GEMMs is a Triton kernel."""

from pathlib import Path
from typing import Final

import torch

from tokenmesh.engine.layers.device_step import DeviceStep
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.kv_store import make_store
from tokenmesh.engine.models.load import load_model, read_model_facts
from tokenmesh.engine.models.native.decoder import Decoder
from tokenmesh.engine.models.raw_config import read_json
from tokenmesh.kernels.dispatch import interpreted_on_cpu
from tokenmesh.kernels.paged_attention import DeviceRows
from tokenmesh.kernels.post_update import post_update
from tokenmesh.kernels.staged_writes import staged_writes
from tokenmesh.kernels.step_inputs import RowState, StepTensors, step_inputs
from tokenmesh.shared.config.model import ModelSettings

PAGE_SIZE, MAX_BLOCKS, MAX_TOKENS = 16, 4, 64
ROW: Final = 2
BLOCKS: Final = (5, 1, 3, 2)
CPU: Final = torch.device("cpu")


def greedy_logits(directory: Path, prompt: list[int], chunk: int, num_decode: int) -> torch.Tensor:
    """Logits [len(prompt) + num_decode, V] at each position; every token is the likeliest.

    The prompt is computed in chunks, then one token a step next to a row of padding.
    """
    raw, settings = read_json(directory / "config.json"), ModelSettings(model=str(directory))
    facts, weights = read_model_facts(raw, directory, settings), Checkpoint(directory)
    decoder = load_model(facts, weights, torch.float32, lambda done, total: None, False)
    assert isinstance(decoder, Decoder)
    with torch.inference_mode(), interpreted_on_cpu():
        run = _Run(decoder, prompt)
        logits = [
            run.step([(ROW, len(prompt[start : start + chunk]))], is_decode=False)
            for start in range(0, len(prompt), chunk)
        ]
        logits += [run.step([(ROW, 1), (-1, 1)], is_decode=True) for _ in range(num_decode)]
        return torch.cat(logits)


class _Run:
    """One request: its row's state and its pages, which start as NaN."""

    def __init__(self, decoder: Decoder, prompt: list[int]) -> None:
        self._decoder = decoder
        self._num_prompt = len(prompt)
        self._computed = 0
        self._store = make_store(decoder.keeps, 6, PAGE_SIZE, 4, torch.float32, CPU)
        for tensor in self._store.tensors:
            tensor.fill_(float("nan"))
        self._state = state = RowState.zeros(4, MAX_TOKENS, MAX_BLOCKS, CPU)
        destinations = [
            state.address(state.token_ids, ROW),
            state.address(state.tables, ROW),
            state.address(state.min_length, ROW),
        ]
        values = [*prompt, *BLOCKS, len(prompt)]
        starts = [0, len(prompt), len(prompt) + len(BLOCKS), len(values)]
        staged_writes(
            state.flat,
            torch.tensor(destinations),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(values, dtype=torch.int32),
        )

    def step(self, batch: list[tuple[int, int]], is_decode: bool) -> torch.Tensor:
        """Compute (row, tokens) of the batch; returns the logits of the first row's tokens."""
        rows = torch.tensor([row for row, _ in batch], dtype=torch.int32)
        counts = torch.tensor([0] + [count for _, count in batch])
        starts = counts.cumsum(0).to(torch.int32)
        num_tokens, num_real = int(starts[-1]), batch[0][1]
        out = StepTensors.zeros(num_tokens, len(batch), MAX_BLOCKS, CPU)
        step_inputs(rows, starts, self._state, PAGE_SIZE, out)
        step = self._step(out, starts, is_decode)
        hidden = self._decoder.embed(out.token_ids)
        hidden = self._decoder.forward(hidden, step, self._store)
        logits = self._decoder.logits(hidden[:num_real])
        self._computed += num_real
        is_last = self._computed >= self._num_prompt
        draws = torch.tensor([0 if is_last else -1] + [-1] * (len(batch) - 1), dtype=torch.int32)
        post_update(rows, starts, draws, logits[-1:].argmax(-1), self._state)
        return logits

    def _step(self, out: StepTensors, starts: torch.Tensor, is_decode: bool) -> DeviceStep:
        """Return the part of a step that layers read."""
        rows = DeviceRows(
            cu_q=starts,
            seq_lens=out.seq_lens,
            block_tables=out.tables,
            num_short=len(out.seq_lens) if is_decode else 0,
            max_short_query=1,
            num_long_tokens=0 if is_decode else len(out.positions),
            num_splits=2,
        )
        return DeviceStep(out.positions, out.lengths, out.slots, rows)
