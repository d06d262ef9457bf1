"""python -m tokenmesh.engine.capacity: see `tokenmesh plan`. It reads what it needs as JSON."""

import json
import logging
import sys
from dataclasses import asdict, replace
from typing import Any, Final

import msgspec
import torch

from tokenmesh.engine.capacity.devices import PlannedDevice, parse_cpus, parse_gpus
from tokenmesh.engine.capacity.sizes import PlannedModel, Size, divisions, size_of
from tokenmesh.engine.capacity.weights import bytes_of
from tokenmesh.engine.exec.choose_dtype import choose_dtype
from tokenmesh.engine.exec.divisible import check_divisible
from tokenmesh.engine.exec.page_dtype import page_dtype_of
from tokenmesh.engine.models.api import ModelFacts
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.load import read_model_facts
from tokenmesh.engine.models.location import locate
from tokenmesh.engine.models.native.build_decoder import names_in
from tokenmesh.engine.models.native.divide import check_sizes
from tokenmesh.engine.models.native.read_config import NativeFacts
from tokenmesh.engine.models.pooling.kind import pools, text_part
from tokenmesh.engine.models.raw_config import RawConfig, read_config
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError, TokenMeshError

_GIB: Final = 1 << 30
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN: Final = ("num_experts_per_tok", "moe_topk", "top_k_experts")
_NO_GPUS: Final = "a model on several GPUs is not served yet"


class PlanQuestion(msgspec.Struct):
    """It holds what the command line asks."""

    model: dict[str, Any]
    worker: dict[str, Any]
    gpus: str | None = None
    cpus: str | None = None
    bandwidth: float | None = None
    tflops: float | None = None
    tokens: int = 1024
    is_json: bool = False


def plan(question: PlanQuestion) -> dict[str, Any]:
    """Every division of the devices, with what it holds. Raises ConfigError, CheckpointError."""
    if (question.gpus is None) == (question.cpus is None):
        raise ConfigError("give either --gpus, such as 8xH100, or --cpus", param="--gpus")
    speeds = question.bandwidth, question.tflops
    count, device = (
        parse_gpus(question.gpus, *speeds)
        if question.gpus is not None
        else parse_cpus(question.cpus or "", *speeds)
    )
    model = ModelSettings.model_validate(question.model)
    worker = WorkerSettings.model_validate({**question.worker, "device": "cpu"})
    subject, facts = _subject(model, worker, device, question.tokens)
    sizes = []
    for ranks, stages in divisions(count):
        problem = _problem(facts, subject, ranks, stages)
        if problem is not None:
            sizes.append(Size(ranks, stages, problem=problem))
            continue
        size = size_of(subject, device, count, ranks, stages)
        sizes.append(replace(size, unserved=_unserved(size, facts, model, worker, device)))
    weights = subject.weights
    return {
        "model": model.model,
        "devices": {"count": count, **asdict(device)},
        "dtype": str(weights.dtype).removeprefix("torch."),
        "kv_dtype": str(subject.page_dtype).removeprefix("torch."),
        "parameters": weights.num_params,
        "stored_bytes": weights.stored_bytes,
        "max_model_len": subject.max_model_len,
        "tokens": subject.tokens,
        "speeds_are": "a cost model with the devices' stated speeds, not a measurement",
        "sizes": [asdict(size) for size in sizes],
    }


def _problem(facts: ModelFacts, subject: PlannedModel, ranks: int, stages: int) -> str | None:
    """Why the model cannot be divided so, whatever the devices are."""
    if stages > len(subject.keeps):
        return f"{len(subject.keeps)} layers are fewer than {stages} stages"
    if ranks > 1 and isinstance(facts, NativeFacts):
        try:
            check_sizes(facts.config, ranks)
        except ConfigError as error:
            return error.message
    return None


def _unserved(
    size: Size,
    facts: ModelFacts,
    model: ModelSettings,
    worker: WorkerSettings,
    device: PlannedDevice,
) -> str:
    """Why this version does not serve a division; empty: it does."""
    ranks, stages = size.tensor_parallel_size, size.pipeline_parallel_size
    if device.is_gpu:
        return _NO_GPUS if ranks * stages > 1 else facts.gpu_problem() or ""
    if ranks * stages == 1:
        return ""
    try:
        sizes = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
        check_divisible(model, worker.model_copy(update=sizes))
    except ConfigError as error:
        return error.message
    return ""


def _subject(
    model: ModelSettings, worker: WorkerSettings, device: PlannedDevice, tokens: int
) -> tuple[PlannedModel, ModelFacts]:
    directory = locate(model, with_code=model.trust_remote_code)
    raw = read_config(directory)
    if pools(model, raw, directory):
        raise ConfigError(f"{model.model} pools: such a model is not divided", param="MODEL")
    facts = read_model_facts(raw, directory, model)
    torch_device = torch.device("cuda" if device.is_gpu else "cpu")
    # whether the GPU of this machine has a type does not matter
    refusing = torch_device if worker.kv_cache_dtype == "int8" else torch.device("cpu")
    dtype = choose_dtype(model, facts, directory, torch_device, native=True)
    checkpoint = Checkpoint(directory, is_extra=facts.is_extra)
    ignored = tuple(getattr(facts, "left_out", ()))
    if isinstance(facts, NativeFacts):
        ignored = names_in(facts, checkpoint).ignored
    weights = bytes_of(facts, checkpoint, dtype, ignored)
    text = text_part(raw)
    keeps = facts.config.keeps if isinstance(facts, NativeFacts) else facts.keeps  # type: ignore[attr-defined]
    if len(weights.layers) != len(keeps):
        problem = f"{len(weights.layers)} layers in its files and {len(keeps)} in its config.json"
        raise ConfigError(f"{model.model} has {problem}", param="MODEL")
    longest = model.stated_len or facts.max_position
    if longest > facts.max_position:
        problem = f"max_model_len is {longest}; {model.model} was made for {facts.max_position}"
        raise ConfigError(problem, param="max_model_len")
    subject = PlannedModel(
        weights=weights,
        keeps=keeps,
        hidden_size=facts.hidden_size,
        inner_size=text.integer("intermediate_size", 4 * facts.hidden_size),
        vocab_size=facts.vocab_size,
        expert_share=_expert_share(text),
        max_model_len=longest,
        may_be_shorter=model.max_model_len == "auto",
        page_dtype=page_dtype_of(worker, dtype, refusing, raw),
        settings=worker,
        tokens=min(tokens, longest),
    )
    return subject, facts


def _expert_share(text: RawConfig) -> float:
    count = next((text.get(key) for key in _EXPERTS if text.get(key)), None)
    chosen = next((text.get(key) for key in _CHOSEN if text.get(key)), None)
    if not isinstance(count, int) or not isinstance(chosen, int):
        return 1.0
    return min(1.0, chosen / count)


_COLUMNS: Final = (
    *("tp", "pp", "workers", "weights", "KV", "KV tokens", "streams", "ms/token"),
    *("token/s", "prefill/s"),
)


def table(found: dict[str, Any]) -> str:
    """The answer for people: a line for each division, then what the columns mean."""
    reasons: dict[str, int] = {}
    rows = [_cells(size, reasons) for size in found["sizes"]]
    widths = [max(len(row[n]) for row in (_COLUMNS, *rows) if n < len(row)) for n in range(2)]
    full = [row for row in (_COLUMNS, *rows) if len(row) == len(_COLUMNS)]
    widths += [max(len(row[n]) for row in full) for n in range(2, len(_COLUMNS))]
    lines = []
    for row in (_COLUMNS, *rows):
        is_full = len(row) == len(_COLUMNS)
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join(cells if is_full else [*cells[:2], row[2]]))
    device = found["devices"]
    head = (
        f"{found['model']}: {found['parameters'] / 1e9:.2f} billion parameters in "
        f"{found['dtype']} on {device['count']} x {device['name']} of {_gib(device['num_bytes'])}"
    )
    meaning = (
        "weights and KV: of the rank with most. KV tokens and streams (of full length) are of one "
        "worker; token/s and prefill/s of all workers.\n"
        f"Speeds are {found['speeds_are']}: streams of {found['tokens']} tokens, "
        f"{device['gb_per_s']:g} GB/s and {device['tflops']:g} TFLOPS a device."
    )
    notes = [f"[{number}] {reason}" for reason, number in reasons.items()]
    return "\n".join([head, "", *lines, "", meaning, *notes])


def _cells(size: dict[str, Any], reasons: dict[str, int]) -> tuple[str, ...]:
    """A line of the table; reasons: numbers of those why a division is not served, extended."""
    pair = str(size["tensor_parallel_size"]), str(size["pipeline_parallel_size"])
    if size["problem"]:
        return (*pair, f"no: {size['problem']}")
    mark, speeds = "", size["speeds"]
    if size["unserved"]:
        mark = f" [{reasons.setdefault(size['unserved'], len(reasons) + 1)}]"
    return (
        *pair,
        str(size["workers"]),
        _gib(size["weight_bytes"]),
        _gib(size["kv_bytes"]),
        f"{size['kv_tokens']:,}",
        str(size["full_length_streams"]),
        f"{speeds['step_ms']:.2f}",
        f"{speeds['tokens_per_s']:,.0f}",
        f"{speeds['prefill_tokens_per_s']:,.0f}{mark}",
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"


def main() -> int:
    """Answer the question on stdin; the exit code."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stderr)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=PlanQuestion)
    try:
        found = plan(question)
    except TokenMeshError as error:
        sys.stderr.write(f"tokenmesh: {error.message}\n")
        return 2
    sys.stdout.write((json.dumps(found, indent=2) if question.is_json else table(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
