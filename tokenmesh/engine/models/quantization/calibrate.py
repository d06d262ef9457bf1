"""Rounding with calibration: the layers of a native model run on a text one after the other, and
the projections of each are rounded by GPTQ for the inputs that they get.

The inputs of a layer come from the rounded layers before it. In memory there are the weights of one
layer, twice while they are rounded, a matrix of float64 [I, I] or three for each width I of inputs,
and the hidden states of the text.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from tokenmesh.engine.adapters.sites import AdapterSites
from tokenmesh.engine.layers.mlp import Mlp
from tokenmesh.engine.layers.rotary import Rotary
from tokenmesh.engine.layers.step import HostStep
from tokenmesh.engine.models.checkpoint import Checkpoint
from tokenmesh.engine.models.kv_store import NO_SCALE, LayerPages, make_store
from tokenmesh.engine.models.native.build_decoder import LayerLoader, names_in
from tokenmesh.engine.models.native.config import Names
from tokenmesh.engine.models.native.decoder import DecoderLayer, turned_step
from tokenmesh.engine.models.native.read_config import (
    NativeFacts,
    is_native,
    read_facts,
)
from tokenmesh.engine.models.quantization.gptq import (
    GptqSpec,
    GptqWeight,
    Hessian,
    Plan,
    relative_error,
    rounded_by_gptq,
)
from tokenmesh.engine.models.raw_config import RawConfig
from tokenmesh.kernels.linear import Linear, Weight
from tokenmesh.shared.errors import CheckpointError, ConfigError

_PROMPT_TOKENS: Final = 512
"""This is the length of the prompts that a text is cut into, where the model has as many
positions."""
_CHARACTERS: Final = 16
"""Read of the text for each token, which bounds what is read of an endless file."""
_PAGE: Final = 16
_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Calibration:
    """A text and what to round to."""

    text: Path
    """UTF-8."""
    max_tokens: int
    """Tokens of it that the layers are run on."""
    spec: GptqSpec


class _Replaced(Checkpoint):
    """A checkpoint in which some weights are replaced."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.weights: Mapping[str, GptqWeight] = {}

    def take_into(self, name: str, target: torch.Tensor) -> None:
        weight = self.weights.get(name)
        if weight is None:
            super().take_into(name, target)
        else:
            target.copy_(weight.decoded())


@dataclass(slots=True)
class _Observed:
    """A weight that adds its inputs to a hessian."""

    weight: Weight
    hessian: Hessian

    def product(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        self.hessian.add(x)
        return self.weight.product(x, out_dtype)


@dataclass(slots=True)
class Calibrator:
    """Rounds the layers of a model in their order, once."""

    facts: NativeFacts
    spec: GptqSpec
    checkpoint: _Replaced
    hidden: list[torch.Tensor]
    """float32 [length, hidden] of each prompt, as the next layer reads it."""
    rotaries: list[Rotary]
    names: Names

    @classmethod
    def open(cls, directory: Path, raw: RawConfig, how: Calibration) -> "Calibrator":
        """Read the text and its embeddings; check the shape of every weight.

        Raises ConfigError for a text, a model or groups that do not fit, CheckpointError for a
        checkpoint that cannot be read.
        """
        if not is_native(raw):
            problem = "is not of the native kind, which GPTQ is limited to"
            raise ConfigError(f"{raw.get('architectures')} {problem}; use --method rtn")
        facts = read_facts(raw)
        config = facts.config
        checkpoint = _Replaced(directory)
        names = names_in(facts, checkpoint)
        calibrator = cls(facts, how.spec, checkpoint, [], [], names)
        calibrator._check_shapes()
        length = min(_PROMPT_TOKENS, config.max_position, how.max_tokens)
        prompts = _prompts(directory, how, length, config.vocab_size)
        shape = (config.vocab_size, config.hidden_size)
        table = checkpoint.take(f"{names.model}embed_tokens.weight", shape, torch.float32)
        calibrator.hidden += [table[prompt] * config.embedding_multiplier for prompt in prompts]
        calibrator.rotaries += [Rotary(rope, _CPU) for rope in config.ropes]
        return calibrator

    def layers(self) -> Iterator[dict[str, GptqWeight]]:
        """Yield the rounded weights of each layer by name."""
        count = len(self.facts.config.layers)
        for number in range(count):
            rounded, error = self._rounded_layer(number)
            sys.stderr.write(f"layer {number + 1} of {count}: relative error {error:.1e}\n")
            yield rounded

    def _check_shapes(self) -> None:
        shapes, size = self.checkpoint.shapes(), self.spec.group_size
        for number in range(len(self.facts.config.layers)):
            for name in (name for group in self._projections(number) for name in group):
                if name not in shapes:
                    raise CheckpointError(f"{self.checkpoint.directory}: {name} is missing")
                if size is not None and shapes[name][-1] % size:
                    problem = f"has {shapes[name][-1]} inputs, which groups of {size} do not divide"
                    raise ConfigError(f"{name} {problem}", param="--group-size")

    @torch.inference_mode()
    def _rounded_layer(self, number: int) -> tuple[dict[str, GptqWeight], float]:
        """The rounded weights by name, and the mean of their relative errors."""
        layer = self._load(number)
        observed = self._observe(number, layer)
        for hidden in self.hidden:
            self._run(layer, number, hidden.clone())
        del layer
        rounded: dict[str, GptqWeight] = {}
        errors = []
        while observed:
            names, hessian = observed.pop()
            try:
                plan = Plan.of(hessian.total, self.spec.act_order)
            except ValueError as error:
                problem = f"{self.checkpoint.file_of(names[0])}: tensor {names[0]}: {error}"
                raise CheckpointError(problem) from error
            for name in names:
                weight = self._weight(name)
                rounded[name] = rounded_by_gptq(weight, plan, self.spec)
                errors.append(relative_error(weight, rounded[name].decoded(), plan.hessian))
        self.checkpoint.weights = rounded
        layer = self._load(number)
        self.checkpoint.weights = {}
        for hidden in self.hidden:
            self._run(layer, number, hidden)
        return rounded, sum(errors) / len(errors)

    def _load(self, number: int) -> DecoderLayer:
        # sites of adapters would keep the weights of every layer
        sites = AdapterSites((self.names.model,))
        loader = LayerLoader(
            self.facts,
            self.facts.config,
            self.names,
            self.checkpoint,
            torch.float32,
            False,
            sites,
            None,
        )
        return loader.load(number, self.facts.config.layers[number])

    def _projections(self, number: int) -> list[list[str]]:
        """Names of the weights of a layer; those that share their input together."""
        family = self.facts.family.names
        groups = (family.qkv, (family.out,), family.gate_up, (family.down,))
        prefix = f"{self.names.model}layers.{number}"
        return [[f"{prefix}.{name}.weight" for name in group] for group in groups]

    def _observe(self, number: int, layer: DecoderLayer) -> list[tuple[list[str], Hessian]]:
        """Observe the inputs of a layer's projections; their names with the hessian."""
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(mlp, Mlp), "layers of native families are dense"
        linears: tuple[Linear, ...] = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        observed = []
        for names, linear in zip(self._projections(number), linears, strict=True):
            hessian = Hessian.of(self.checkpoint.shapes()[names[0]][1])
            linear.weight = _Observed(linear.weight, hessian)
            observed.append((names, hessian))
        return observed

    def _weight(self, name: str) -> torch.Tensor:
        outputs, inputs = self.checkpoint.shapes()[name]
        weight = self.checkpoint.take(name, (outputs, inputs), torch.float32)
        if not weight.isfinite().all():
            problem = f"tensor {name} has numbers that are infinite or NaN"
            raise CheckpointError(f"{self.checkpoint.file_of(name)}: {problem}")
        return weight

    def _run(self, layer: DecoderLayer, number: int, hidden: torch.Tensor) -> None:
        """Run a layer on one prompt: hidden [T, H] is replaced by the layer's result."""
        config, length = self.facts.config, len(hidden)
        num_blocks = -(-length // _PAGE)
        step = HostStep(
            starts=[0],
            counts=[length],
            numbers=[0],
            all_tables=torch.arange(num_blocks)[None],
            page_size=_PAGE,
            token_lengths=[length] * length,
        )
        store = make_store([config.keeps[number]], num_blocks, _PAGE, 1, torch.float32, _CPU)
        pages = LayerPages(store.layers[0][0], 0, NO_SCALE)
        turned = turned_step(config, self.rotaries, step)
        added = layer.forward(hidden, None, turned, pages, config)
        hidden.add_(added, alpha=config.residual_multiplier)


def _prompts(directory: Path, how: Calibration, length: int, vocab_size: int) -> list[torch.Tensor]:
    """int64 [length] each: parts of the text that follow each other, as the model sees prompts."""
    tokenizer = _tokenizer(directory)
    try:
        with how.text.open(encoding="utf-8") as text:
            read = text.read(how.max_tokens * _CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{how.text} cannot be read as UTF-8 text: {error}"
        raise ConfigError(problem, param="--calibration") from error
    ids = tokenizer.encode(read, add_special_tokens=False).ids[: how.max_tokens]
    # what the tokenizer puts before a text, such as a token for its beginning
    beginning = tokenizer.encode("a").ids
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    beginning = beginning[: beginning.index(plain[0])] if plain and plain[0] in beginning else []
    own = length - len(beginning)
    if own < 1 or len(ids) < own:
        problem = f"has {len(ids)} tokens; calibration needs {max(own, 1)}, and more are better"
        raise ConfigError(f"{how.text} {problem}", param="--calibration")
    largest = max((*ids, *beginning))
    if largest >= vocab_size:
        problem = f"tokenizer.json has token {largest}, but config.json {vocab_size} tokens"
        raise CheckpointError(f"{directory}: {problem}")
    starts = range(0, len(ids) - own + 1, own)
    return [torch.tensor([*beginning, *ids[start : start + own]]) for start in starts]


def _tokenizer(directory: Path) -> Tokenizer:
    """Raises CheckpointError where it is missing or cannot be read."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{directory}: holds no tokenizer.json, which calibration needs")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises this very class
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
