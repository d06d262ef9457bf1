"""llama.cpp as a library, by the low-level functions of llama-cpp-python: files and decode steps.

Greedy over numpy's view of the logits, all sequences in one batch a step.
"""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

FILE_TYPES: Final = {"Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "Q4_K_M": "LLAMA_FTYPE_MOSTLY_Q4_K_M"}
_CONTEXT_STEP: Final = 256
_BATCH: Final = 2048
"""Tokens of one call, at most."""


def quantize(source: Path, target: Path, kind: str) -> None:
    """A copy of a GGUF file in another of `FILE_TYPES`. Raises RuntimeError."""
    import llama_cpp  # type: ignore[import-not-found, unused-ignore]

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, FILE_TYPES[kind])
    parameters.nthread = 2
    names = str(source).encode(), str(target).encode()
    if llama_cpp.llama_model_quantize(*names, ctypes.byref(parameters)) != 0:
        raise RuntimeError(f"llama.cpp could not write {target} as {kind}")


class LlamaLibrary:
    """A loaded file; one run at a time."""

    def __init__(self, path: Path | str, threads: int) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._threads = threads
        self.began_s = 0.0
        """When the last run had its context and began, by `time.perf_counter`."""
        self._keep = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._keep, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def run(self, prompts: list[list[int]], num_tokens: int) -> list[list[float]]:
        """All at once: when each token of each came. Raises RuntimeError."""
        length = len(prompts[0]) + num_tokens
        context = len(prompts) * -(-length // _CONTEXT_STEP) * _CONTEXT_STEP
        times: list[list[float]] = [[] for _ in prompts]
        with self._context(context, len(prompts)) as (running, batch):
            self.began_s = time.perf_counter()
            next_ids = [
                self._prefill(running, batch, prompt, number)
                for number, prompt in enumerate(prompts)
            ]
            for place in range(num_tokens):
                now = time.perf_counter()
                for each in times:
                    each.append(now)
                if place + 1 == num_tokens:
                    break
                entries = [
                    (token, len(prompts[number]) + place, number, True)
                    for number, token in enumerate(next_ids)
                ]
                self._step(running, batch, entries)
                next_ids = [int(self._row(running, i).argmax()) for i in range(len(entries))]
        return times

    def logits(self, ids: list[int]) -> Any:
        """[tokens, vocabulary] after each token of a text of at most `_BATCH`. Raises
        RuntimeError."""
        with self._context(-(-len(ids) // _CONTEXT_STEP) * _CONTEXT_STEP, 1) as (running, batch):
            self._step(running, batch, [(token, i, 0, True) for i, token in enumerate(ids)])
            return np.stack([self._row(running, i) for i in range(len(ids))])

    @contextmanager
    def _context(self, size: int, sequences: int) -> Iterator[tuple[Any, Any]]:
        """A context of so many tokens in all, and a batch for it."""
        api = self._api
        parameters = api.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = size, sequences
        parameters.n_batch, parameters.n_ubatch = _BATCH, 512
        parameters.n_threads = parameters.n_threads_batch = self._threads
        running = api.llama_init_from_model(self._model, parameters)
        batch = api.llama_batch_init(_BATCH, 0, 1)
        try:
            yield running, batch
        finally:
            api.llama_batch_free(batch)
            api.llama_free(running)

    def _prefill(self, running: Any, batch: Any, prompt: list[int], number: int) -> int:
        """The token that follows a prompt, which is sequence `number`."""
        last = len(prompt) - 1
        for first in range(0, len(prompt), _BATCH):
            part = range(first, min(first + _BATCH, len(prompt)))
            entries = [(prompt[place], place, number, place == last) for place in part]
            self._step(running, batch, entries)
        return int(self._row(running, -1).argmax())

    def _step(self, running: Any, batch: Any, entries: list[tuple[int, int, int, bool]]) -> None:
        """(token, position, sequence, whether logits are wanted after it)."""
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, is_last) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_last
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if self._api.llama_decode(running, batch) != 0:
            raise RuntimeError("llama.cpp could not decode")

    def _row(self, running: Any, place: int) -> Any:
        """A view of the logits after entry `place` of the last step; -1: after its last."""
        row = self._api.llama_get_logits_ith(running, place)
        return np.ctypeslib.as_array(row, (self._size,))
