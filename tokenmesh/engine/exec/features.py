"""Settings that some kinds of workers refuse, and why: a page of the reference lists them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError


class WorkerKind(NamedTuple):
    """It holds what a worker computes, and where."""

    pools: bool
    is_gpu: bool

    def __str__(self) -> str:
        return f"{'pools' if self.pools else 'generates'} on a {'GPU' if self.is_gpu else 'CPU'}"


KINDS: Final = tuple(
    WorkerKind(pools, is_gpu) for pools in (False, True) for is_gpu in (False, True)
)
_GPUS: Final = tuple(kind for kind in KINDS if kind.is_gpu)
_POOLERS: Final = tuple(kind for kind in KINDS if kind.pools)


@dataclass(frozen=True, slots=True)
class Feature:
    """A setting, and the kinds of workers that refuse it at their start."""

    key: str
    is_asked: Callable[[ModelSettings, WorkerSettings], bool]
    refused: Mapping[WorkerKind, str]
    values: str = ""
    """The values of the setting that are meant; empty: any that asks for it."""


def _by(kinds: tuple[WorkerKind, ...], why: str) -> dict[WorkerKind, str]:
    return dict.fromkeys(kinds, why)


NO_INT8_PAGES: Final = "kv_cache_dtype int8 is served on a CPU only; on a GPU there is fp8"
FEATURES: Final = (
    Feature(
        "model.speculative_config",
        lambda model, _: model.speculative_config.method is not None,
        _by(
            (*_POOLERS, WorkerKind(pools=False, is_gpu=True)),
            "speculative_config: the runner for this model and device computes one token at a time",
        ),
        "a method",
    ),
    Feature(
        "worker.batch_invariant",
        lambda _, worker: worker.batch_invariant,
        _by(
            _GPUS,
            "batch_invariant does not hold on a GPU, where splits and matrix products depend on "
            "the batch; leave it out or set worker.device to cpu",
        ),
    ),
    Feature(
        "worker.block_size",
        lambda _, worker: bool(worker.block_size & (worker.block_size - 1)),
        _by(_GPUS, "block_size is a power of two on a GPU"),
        "no power of two",
    ),
    Feature(
        "worker.kv_cache_dtype",
        lambda _, worker: worker.kv_cache_dtype == "int8",
        _by(_GPUS, NO_INT8_PAGES),
        "int8",
    ),
    Feature(
        "worker.kv_offloading_size",
        lambda _, worker: worker.host_tier_bytes > 0,
        _by(
            _GPUS,
            "kv_offloading_size keeps KV of models on CPUs only; leave it out or set "
            "worker.device to cpu",
        ),
    ),
    Feature(
        "worker.logprobs_mode",
        lambda _, worker: worker.logprobs_mode != "raw_logprobs",
        _by(_GPUS, "logprobs_mode processed_logprobs is for CPUs; a GPU shows raw_logprobs"),
        "processed_logprobs",
    ),
    Feature(
        "worker.lora.enable_lora",
        lambda _, worker: worker.lora.enable_lora,
        _by(
            (WorkerKind(pools=True, is_gpu=True),),
            "adapters of models that pool are served on a CPU only; leave enable_lora out or set "
            "worker.device to cpu",
        ),
    ),
)


def check_features(kind: WorkerKind, model: ModelSettings, worker: WorkerSettings) -> None:
    """Raise ConfigError for the first setting that such a worker refuses."""
    for feature in FEATURES:
        if kind in feature.refused and feature.is_asked(model, worker):
            raise ConfigError(feature.refused[kind], param=feature.key)
