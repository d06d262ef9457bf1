"""Define what several ranks cannot serve, said before any of them is started."""

from pathlib import Path
from typing import Final

from tokenmesh.engine.exec.device import device_of
from tokenmesh.engine.models.api import ModelFacts
from tokenmesh.engine.models.load import read_model_facts
from tokenmesh.engine.models.location import locate
from tokenmesh.engine.models.native.divide import check_sizes
from tokenmesh.engine.models.native.read_config import NativeFacts
from tokenmesh.engine.models.pooling.kind import pools, read_pooling
from tokenmesh.engine.models.raw_config import RawConfig, read_config
from tokenmesh.engine.ranks.ranks import Ranks
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

_PARAM: Final = "worker.tensor_parallel_size"
_STAGES_PARAM: Final = "worker.pipeline_parallel_size"
_LOOKUPS: Final = (None, "ngram", "suffix")
"""Where drafts come from tokens, which the leader has."""


def check_divisible(model: ModelSettings, worker: WorkerSettings) -> None:
    """Raises ConfigError that names what does not work on so many ranks."""
    world, stages = worker.tensor_parallel_size, worker.pipeline_parallel_size
    method = model.speculative_config.method
    refused = {
        "on a GPU: several GPUs are not served yet": device_of(worker).type == "cuda",
        "where workers exchange KV (kv.role)": worker.kv.role is not None,
        "where KV is kept elsewhere (kv.disk_dir, kv.mooncake_master)": worker.kv.has_stores,
        "with a model that drafts": stages > 1 and method not in _LOOKUPS,
    }
    if worker.enable_eplb:
        _check_eplb(worker)
    for what, is_asked in refused.items():
        if is_asked:
            raise _error(worker, what)
    directory = locate(model, with_code=model.trust_remote_code)
    raw = read_config(directory)
    if pools(model, raw, directory):
        _check_tree(_pool_facts(model, worker, raw, directory), worker)
        return
    facts = read_model_facts(raw, directory, model)
    if isinstance(facts, NativeFacts):
        if world > 1:
            check_sizes(facts.config, world)
        if worker.enable_eplb:
            raise _eplb(f"{facts.architecture} has no experts")
        num_layers = len(facts.config.layers)
        if num_layers < stages:
            problem = f"{num_layers} layers are fewer than {stages} stages"
            raise ConfigError(f"pipeline_parallel_size {stages}: {problem}", param=_STAGES_PARAM)
        return
    _check_tree(facts, worker)


def _check_eplb(worker: WorkerSettings) -> None:
    world, spare = worker.tensor_parallel_size, worker.eplb_config.num_redundant_experts
    if not worker.enable_expert_parallel:
        raise _eplb("it moves whole experts, which ranks have with enable_expert_parallel")
    if spare % world:
        raise _eplb(f"{spare} redundant experts are not divisible by {world} ranks")


def _eplb(problem: str) -> ConfigError:
    return ConfigError(f"enable_eplb: {problem}", param="worker.enable_eplb")


def _pool_facts(
    model: ModelSettings, worker: WorkerSettings, raw: RawConfig, directory: Path
) -> ModelFacts:
    pooling = read_pooling(model, raw, directory)
    if not pooling.is_causal:
        raise _error(worker, "for an encoder, which has no causal attention")
    from tokenmesh.engine.models.tree.pooling.build import read_pool_facts

    return read_pool_facts(raw, directory, pooling)


def _check_tree(facts: ModelFacts, worker: WorkerSettings) -> None:
    world, stages = worker.tensor_parallel_size, worker.pipeline_parallel_size
    if stages > 1:
        problem = f"for {facts.architecture}, which is not of the native kind"
        what = f"pipeline_parallel_size {stages} does not work {problem}"
        raise ConfigError(what, param=_STAGES_PARAM)
    from tokenmesh.engine.models.tree.facts import HfFacts
    from tokenmesh.engine.models.tree.part import TreePart

    assert isinstance(facts, HfFacts)
    if facts.rounding is not None:
        what = "for a module tree whose weights are rounded when it is loaded"
        raise _error(worker, what)
    part = TreePart(facts, Ranks(0, world, by_expert=worker.enable_expert_parallel))
    part.check()
    if worker.enable_eplb and not part.has_experts:
        raise _eplb(f"{facts.architecture} has no experts")


def _error(worker: WorkerSettings, what: str) -> ConfigError:
    world, stages = worker.tensor_parallel_size, worker.pipeline_parallel_size
    if world > 1:
        return ConfigError(f"tensor_parallel_size {world} does not work {what}", param=_PARAM)
    problem = f"pipeline_parallel_size {stages} does not work {what}"
    return ConfigError(problem, param=_STAGES_PARAM)
