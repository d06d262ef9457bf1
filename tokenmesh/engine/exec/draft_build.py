"""A model that drafts for another: what it must have in common with it, its weights, its pool."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from tokenmesh.engine.exec.drafter import Drafter, DraftModel
from tokenmesh.engine.exec.page_dtype import page_dtype_of
from tokenmesh.engine.exec.rows import HostRows
from tokenmesh.engine.layers.step import HostStep
from tokenmesh.engine.models.api import LanguageModel, ModelFacts
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.heads.read_eagle import (
    EagleFacts,
    EagleLoader,
    directory_kind,
    read_eagle,
)
from tokenmesh.engine.models.keeps import (
    Grouping,
    LayerKeeps,
    cross_bytes,
    row_bytes,
    token_bytes,
)
from tokenmesh.engine.models.kv_store import KvStore, make_store
from tokenmesh.engine.models.load import load_model, read_model_facts
from tokenmesh.engine.models.location import locate
from tokenmesh.engine.models.pooling.kind import pools
from tokenmesh.engine.models.raw_config import RawConfig, read_config
from tokenmesh.engine.models.token_ids import vocabulary_problem
from tokenmesh.engine.sampling.sampler import Sampler
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import ConfigError

if TYPE_CHECKING:
    from tokenmesh.engine.models.tree.mtp import MtpFacts

PARAM = "model.speculative_config"


@dataclass(frozen=True, slots=True)
class DecoderDraft:
    """A whole model as a draft. Implements `DraftModel`."""

    whole: LanguageModel
    shift: int = 0
    taps: tuple[int, ...] = ()
    position_rows: int = 1

    @property
    def max_position(self) -> int:
        return self.whole.facts.max_position

    @property
    def vocab_size(self) -> int:
        return self.whole.facts.vocab_size

    @property
    def keeps(self) -> tuple[LayerKeeps, ...]:
        return self.whole.keeps

    @property
    def grouping(self) -> Grouping:
        return self.whole.grouping

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    def embed(self, token_ids: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        return self.whole.embed(token_ids)

    def forward(self, hidden: torch.Tensor, step: HostStep, store: KvStore) -> torch.Tensor:
        return self.whole.forward(hidden, step, store)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.whole.logits(hidden)

    def states(self, hidden: torch.Tensor, taps: torch.Tensor | None) -> torch.Tensor:
        return hidden


class DraftTarget(NamedTuple):
    """The model that is drafted for, before its weights are read."""

    settings: ModelSettings
    directory: Path
    facts: ModelFacts
    worker: WorkerSettings
    device: torch.device
    dtype: torch.dtype
    native: bool
    """True where the C kernels run."""
    raw: RawConfig
    share_ends: Callable[[LanguageModel], LanguageModel]
    """See `Role.share_ends`."""


@dataclass(frozen=True, slots=True)
class DraftMaker:
    """A draft model's checkpoint, read as far as its config. Use it within
    `torch.inference_mode()`."""

    target: DraftTarget
    settings: ModelSettings
    directory: Path
    facts: ModelFacts
    """They describe the draft model, or the layers of a head."""
    page_dtype: torch.dtype
    eagle: EagleFacts | None = None
    """It holds what the config of a head says; None for a whole model."""
    mtp: "MtpFacts | None" = None
    """It holds the same of the model's own head."""

    @classmethod
    def of(cls, target: DraftTarget) -> "DraftMaker | None":
        """None: no model drafts. Raises CheckpointError, and ConfigError for one that cannot."""
        config, worker = target.settings.speculative_config, target.worker
        if not config.is_drafted:
            return None
        if target.device.type == "cuda":
            raise _refused("models that draft run on a CPU only")
        if config.method == "mtp":
            return cls._of_own(target)
        assert config.model is not None
        # where the served model sees media, a draft sees placeholders
        settings = ModelSettings(
            model=config.model, revision=config.revision, language_model_only=True
        )
        directory = locate(settings)
        raw = read_config(directory)
        eagle = None
        facts: ModelFacts
        if config.method == "eagle" or config.method == "eagle3":
            layers = config.eagle_aux_hidden_state_layer_ids
            eagle = read_eagle(raw, config.method, layers, target.raw)
            facts = eagle.text
            most = eagle.num_trained
            if most is not None and config.max_drafts > most and not config.allow_more_than_trained:
                raise _refused(
                    f"{config.model} was trained for {most} drafts, not {config.max_drafts}; lower "
                    "num_speculative_tokens or set allow_more_than_trained"
                )
        else:
            _check_whole(settings, raw, directory)
            facts = read_model_facts(raw, directory, settings)
        if facts.vocab_size != target.facts.vocab_size:
            raise _refused(
                f"{config.model} has a vocabulary of {facts.vocab_size} tokens, and that of "
                f"{target.settings.model} has {target.facts.vocab_size}"
            )
        problem = vocabulary_problem(target.settings, settings)
        if problem is not None:
            raise _refused(problem)
        page_dtype = page_dtype_of(worker, target.dtype, target.device, raw)
        return cls(target, settings, directory, facts, page_dtype, eagle)

    @classmethod
    def _of_own(cls, target: DraftTarget) -> "DraftMaker":
        """For a head in the model's own checkpoint."""
        # imported here: it brings transformers' modules
        from tokenmesh.engine.models.tree.mtp import read_mtp

        settings, raw = target.settings, target.raw
        other = settings.speculative_config.model
        if other not in (None, settings.model):
            raise _refused(f"mtp is a head of {settings.model} itself, not of {other}")
        mtp = read_mtp(raw, target.facts, settings.speculative_config.max_drafts)
        page_dtype = page_dtype_of(target.worker, target.dtype, target.device, raw)
        return cls(target, settings, target.directory, target.facts, page_dtype, mtp=mtp)

    def load(self, drafted: LanguageModel) -> "Draft":
        """For a model with weights. Raises CheckpointError, and ConfigError for a draft that keeps
        more than blocks hold, for a head whose states the model does not give, and for drafts that
        branch where the model keeps states or several groups of blocks."""
        if self.target.settings.speculative_config.tree is not None:
            what = "speculative_token_tree is for models without"
            if row_bytes(drafted.keeps):
                raise _refused(f"{what} states, which each branch would need")
            if len(drafted.grouping.windows) > 1:
                raise _refused(f"{what} windows, whose blocks have tables of their own")
        return Draft(self.read(drafted), self.page_dtype, self)

    def read(self, drafted: LanguageModel) -> DraftModel:
        """The weights; see `load`."""
        target, ends = self.target, self.target.share_ends(drafted)
        if self.mtp is not None:
            from tokenmesh.engine.models.tree.mtp import MtpLoader

            size = target.worker.load_buffer_bytes
            parts = (self.mtp, self.directory, target.device, size, ends, target.native)
            return MtpLoader(*parts).load()
        checkpoint = Checkpoint(
            self.directory,
            target.device,
            target.worker.load_buffer_bytes,
            (),
            self.facts.is_extra,
        )
        if self.eagle is not None:
            if self.eagle.taps and max(self.eagle.taps) >= drafted.num_tap_layers:
                what = f"{target.settings.model} shows no states of its layers"
                raise _refused(f"{what}, which {self.settings.model} reads")
            native, facts = target.native, target.facts
            is_coded = facts.rounding is not None or facts.quantization is not None
            return EagleLoader(
                *(self.eagle, checkpoint, ends, drafted.dtype, native),
                rounding="int8" if native and is_coded else None,
            ).load()
        whole = load_model(
            self.facts, checkpoint, target.dtype, lambda done, total: None, target.native
        )
        if row_bytes(whole.keeps) or cross_bytes(whole.keeps, target.dtype):
            raise _refused(f"{self.settings.model} keeps states, which cannot follow drafts")
        return DecoderDraft(whole)


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model with weights."""

    model: DraftModel
    page_dtype: torch.dtype
    maker: DraftMaker

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in all layers of the draft."""
        grouping = self.model.grouping
        one = token_bytes(self.model.keeps, grouping, self.page_dtype)
        return one * len(grouping.windows)

    def drafter(self, num_blocks: int, rows: HostRows, sampler: Sampler) -> Drafter:
        """With pages for so many blocks."""
        target, grouping = self.maker.target, self.model.grouping
        store = make_store(
            self.model.keeps,
            num_blocks * len(grouping.windows),
            target.worker.block_size,
            target.worker.num_rows,
            self.model.dtype,
            target.device,
            grouping,
            page_dtype=self.page_dtype,
        )
        config = target.settings.speculative_config
        return Drafter(
            self.model,
            store,
            num_blocks,
            rows,
            sampler,
            config.max_drafts,
            self.maker.read,
            draws_apart=config.draws_apart,
            tree=config.tree,
        )


def _check_whole(settings: ModelSettings, raw: RawConfig, directory: Path) -> None:
    """Raise ConfigError for heads and for models that pool."""
    kind = directory_kind(raw)
    if kind is not None:
        raise _refused(f"{settings.model} is a head, not a model: its method is {kind}")
    if pools(settings, raw, directory):
        raise _refused(f"{settings.model} pools; it drafts nothing")


def _refused(problem: str) -> ConfigError:
    return ConfigError(f"speculative_config: {problem}", param=PARAM)
