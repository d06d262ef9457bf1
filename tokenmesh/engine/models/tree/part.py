"""The part of a module tree that a rank has: a smaller tree of the same family.

A config with fewer heads and narrower MLPs describes it. Where the shapes of both trees differ, a
tensor is cut, and what reads a cut input is summed over the ranks. Names of families do not count,
but only those are divided that a test has compared (`PROVED`).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tokenmesh.engine.models.tree.cuts import Cut, CutTensor, Shapes
from tokenmesh.engine.models.tree.facts import HfFacts, empty_tree
from tokenmesh.engine.models.tree.part_convolutions import (
    adjusted_width,
    is_short_convolution,
    narrow,
)
from tokenmesh.engine.models.tree.part_experts import names_of_others, part_of_experts, take_form
from tokenmesh.engine.models.tree.part_pieces import pieces_of
from tokenmesh.engine.models.tree.quantized.expert_codes import is_experts
from tokenmesh.engine.ranks.ranks import Ranks
from tokenmesh.shared.errors import ConfigError

_PARAM: Final = "worker.tensor_parallel_size"
_EQUAL: Final = (
    *("num_attention_heads", "linear_num_value_heads", "linear_num_heads"),
    *("mamba_n_heads", "mamba_num_heads", "num_heads"),
    *("intermediate_size", "moe_intermediate_size", "intermediate_size_mlp", "mamba_d_ssm"),
    *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("shared_intermediate_size", "dense_intermediate_size"),
)
"""Keys of config.json of which each rank has an equal part."""
_REPEATED: Final = ("num_key_value_heads", "linear_num_key_heads")
"""Keys of what several ranks may need."""
_OF_EXPERTS: Final = "moe_intermediate_size"
"""The key of a width that ranks with whole experts need not divide."""
_GROUPS: Final = ("mamba_n_groups", "n_groups")
"""Keys of groups of heads, over each of which a norm is taken: those of a rank are whole, unless
there is one group, which all ranks share."""
_JOINED: Final = "qwen3_next"
"""The model type whose states' weights lie by heads of keys, each with its heads of values."""
_EXPANSIONS: Final = ("mamba_expand", "expand")
"""Keys that say how many times as wide as the model its states are."""
_ADJUSTED: Final = "block_auto_adjust_ff_dim"
"""The key that says that MLPs have another width than `intermediate_size`."""
_OF_SIZES: Final = frozenset(
    (
        *("num_heads", "num_attention_heads", "num_key_value_heads", "num_key_value_groups"),
        *("num_v_heads", "num_k_heads", "key_dim", "value_dim", "conv_dim", "qkv_dim"),
        *("in_features", "out_features", "in_channels", "out_channels", "groups", "pad_token_id"),
        *("intermediate_size", "moe_intermediate_size", "intermediate_dim", "expert_dim"),
        *("shared_expert_intermediate_size", "n_groups", "group_size", "num_embeddings"),
        *(
            "hidden_size",
            "num_experts",
            "groups_time_state_size",
            "vocab_size",
            "padding_idx",
            "ffn_dim",
            "hidden_dim",
        ),
    )
)
"""Attributes of modules that may differ between a tree and a part of it."""

PROVED: Final = frozenset(
    (
        *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "phi3", "smollm3"),
        *("granite", "glm", "glm4", "seed_oss", "hunyuan_v1_dense", "exaone4", "olmo2", "olmo3"),
        *("gemma", "gemma2", "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"),
        *("hunyuan_v1_moe", "glm4_moe", "exaone_moe", "minimax_m2", "gpt_oss", "ernie4_5_moe"),
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_linear"),
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
        *("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "lfm2"),
        *("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "hunyuan_vl_text"),
    )
)
"""Model types whose parts `test_tree_ranks.py` and `test_media_ranks.py` have compared with whole
models."""


@dataclass(frozen=True)
class TreePart:
    """The part of a tree that `ranks.rank` has."""

    whole: HfFacts
    ranks: Ranks

    @cached_property
    def facts(self) -> HfFacts:
        """The facts of the smaller tree."""
        experts = part_of_experts(self._whole_tree, self.ranks)
        kind = _part_kind(self.whole.kind, experts, self.ranks.world)
        return replace(self.whole, config=part_config(self.whole, self.ranks), kind=kind)

    @cached_property
    def _whole_tree(self) -> PreTrainedModel:
        return empty_tree(self.whole.config, self.whole.kind)

    @cached_property
    def _trees(self) -> tuple[PreTrainedModel, PreTrainedModel]:
        """The whole one and the part, without weights."""
        return self._whole_tree, empty_tree(self.facts.config, self.facts.kind)

    def taken(self, tensors: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
        """Stored tensors, of which those that are cut are read in part."""
        cuts, others = self.cuts(shapes), names_of_others(self._whole_tree, self.ranks)
        tensors = {name: each for name, each in tensors.items() if name not in others}
        return tensors | {name: CutTensor(tensors[name], cut) for name, cut in cuts.items()}

    def cuts(self, shapes: Shapes) -> Mapping[str, Cut]:
        """The cuts of the tensors that are not read whole, by their names in the checkpoint.

        shapes: of all that it stores. One of another shape than the tree's is left as it is, and
        refused with both when it is loaded.
        """
        whole, part = self._trees
        shapes, prefix = _as_in(whole, shapes)
        own = whole.state_dict()
        places = {id(tensor): name for name, tensor in own.items()}
        stored = revert_weight_conversion(whole, own)
        asked = revert_weight_conversion(part, part.state_dict())
        cuts = {
            name: self._cut(places.get(id(tensor), ""), tensor.shape, asked[name].shape)
            for name, tensor in stored.items()
            if name in asked
            and tensor.shape != asked[name].shape
            and shapes.get(name) == tuple(tensor.shape)
        }
        for name, module, cut in self.modules():
            if isinstance(module, torch.nn.Conv1d) and isinstance(cut, torch.nn.Conv1d):
                cuts |= self._joined(f"{name}.weight", module.weight, len(cut.weight), shapes)
        return {f"{prefix}{name}": cut for name, cut in cuts.items()}

    def _joined(
        self,
        place: str,
        weight: torch.Tensor,
        part: int,
        shapes: Shapes,
    ) -> Mapping[str, Cut]:
        """The cuts of a parameter whose rows are stored as several tensors of any sizes."""
        names = list(revert_weight_conversion(self._trees[0], {place: weight}))
        if len(names) == 1 or sum(shapes.get(name, (0,))[0] for name in names) != len(weight):
            return {}
        pieces, first, cuts = self._pieces(place, len(weight), part), 0, {}
        for name in names:
            rows, *others = shapes[name]
            within = [(p.start - first, p.stop - first) for p in pieces]
            found = [slice(max(0, a), min(rows, b)) for a, b in within if b > 0 and a < rows]
            cuts[name] = [found or [slice(0, 0)], *([slice(0, size)] for size in others)]
            first += rows
        return cuts

    def cut_of(self, place: str, whole: torch.Tensor, own: torch.Tensor) -> Cut:
        """The pieces of a parameter of the tree."""
        return self._cut(place, whole.shape, own.shape)

    def _cut(self, place: str, sizes: Sequence[int], parts: Sequence[int]) -> Cut:
        return [
            [slice(0, size)] if size == part else self._pieces(place, size, part)
            for size, part in zip(sizes, parts, strict=True)
        ]

    def _pieces(self, place: str, size: int, part: int) -> list[slice]:
        """The rows of one dimension; `place`: the parameter's name in the tree, or none."""
        whole, own = self._trees
        if place in _tables(whole):
            return [self.ranks.padded_part(size)]
        sizes, parts = ([total] for total in (size, part))
        if place and not (self.ranks.by_expert and is_experts(_owner(whole, place))):
            sizes, parts = pieces_of(whole, place, size), pieces_of(own, place, part)
        pieces, first = [], 0
        for of_all, of_own in zip(sizes, parts, strict=True):
            start = self.ranks.rank * of_all // self.ranks.world // of_own * of_own
            start = first + (0 if of_own == of_all else start)
            pieces.append(slice(start, start + of_own))
            first += of_all
        return pieces

    def check(self) -> None:
        """Raise ConfigError for a tree of which a part would compute something else."""
        kind = self.whole.config.get_text_config().model_type
        if kind not in PROVED:
            raise _undivided(f"no test has compared parts of the model type {kind!r}")
        whole, part = self._trees
        own = dict(part.named_modules())
        for name, module in whole.named_modules():
            _check_numbers(name, module, own[name])
        for name, module, cut in self.modules():
            both = zip(module.parameters(recurse=False), cut.parameters(recurse=False), strict=True)
            if any(_num_cut(*each) > 1 for each in both):
                raise _undivided(f"{name} would be cut by its inputs and its outputs")
            if isinstance(module, torch.nn.Conv1d) and module.groups != module.in_channels:
                raise _undivided(f"{name} convolves over all channels")

    @property
    def has_experts(self) -> bool:
        return any(map(is_experts, self._whole_tree.modules()))

    def modules(self) -> list[tuple[str, torch.nn.Module, torch.nn.Module]]:
        """Those that have a part of a tensor of their own: names, and the modules of both trees."""
        whole, part = self._trees
        own = dict(part.named_modules())
        found = [(name, module, own[name]) for name, module in whole.named_modules()]
        return [each for each in found if _is_cut(*each[1:])]


def _as_in(tree: PreTrainedModel, shapes: Shapes) -> tuple[Shapes, str]:
    """Shapes by the names of a tree, and what the checkpoint has before them: that of a body may be
    one of a model with a head."""
    prefix = f"{tree.base_model_prefix}."
    if tree.base_model is not tree or not any(name.startswith(prefix) for name in shapes):
        return shapes, ""
    return {name.removeprefix(prefix): shape for name, shape in shapes.items()}, prefix


def _part_kind(
    kind: type[PreTrainedModel], experts: Mapping[str, torch.nn.Module], world: int
) -> type[PreTrainedModel]:
    """A class whose trees are as wide as their configs say, also where a norm over all heads takes
    its width from another key. experts: what its own are like, by their paths."""

    def build(self: Any, config: Any, *args: Any, **named: Any) -> None:
        kind.__init__(self, config, *args, **named)
        for path, like in experts.items():
            take_form(self.get_submodule(path), like)
        for module in self.modules():
            if is_short_convolution(module):
                narrow(module, world)
            for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
                weight = getattr(getattr(module, norm, None), "weight", None)
                size = getattr(getattr(module, projection, None), "out_features", None)
                if weight is not None and size is not None and len(weight) > size:
                    getattr(module, norm).weight = torch.nn.Parameter(weight.detach()[:size])

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def part_config(facts: HfFacts, ranks: Ranks) -> PreTrainedConfig:
    """The config of a rank's part. Raises ConfigError with both numbers where there is none."""
    config, world = copy.deepcopy(facts.config), ranks.world
    text: Any = config.get_text_config()
    values: dict[str, Any] = {}
    if getattr(text, "head_dim", None) is None and hasattr(text, "num_attention_heads"):
        values["head_dim"] = text.hidden_size // text.num_attention_heads
    if getattr(text, _ADJUSTED, False):
        setattr(text, _ADJUSTED, False)
        text.intermediate_size = adjusted_width(text)
    for key, size in _numbers(text, _EQUAL):
        if size % world == 0:
            values[key] = size // world
        elif not (ranks.by_expert and key == _OF_EXPERTS):
            raise _problem(world, f"{key} of {size} is not divisible by {world} ranks")
    for key, size in _numbers(text, _REPEATED):
        if size % world and world % size:
            what = f"{key} of {size} and {world} ranks: neither is a multiple of the other"
            raise _problem(world, what)
        values[key] = max(1, size // world)
    for key, size in _numbers(text, _GROUPS):
        if size != 1 and size % world:
            raise _problem(world, f"{key} of {size} is not divisible by {world} ranks")
        values[key] = max(1, size // world)
    if text.model_type == _JOINED and text.linear_num_key_heads % world:
        heads = text.linear_num_key_heads
        raise _problem(world, f"{heads} heads of keys are not divisible by {world} ranks")
    part, size = ranks.padded_part(facts.vocab_size), facts.vocab_size
    if (world - 1) * -(-size // world) >= size:
        raise _problem(world, f"a vocabulary of {size} leaves nothing for one of {world} ranks")
    values["vocab_size"] = part.stop - part.start
    for key, value in values.items():
        setattr(text, key, value)
    for key in _EXPANSIONS:
        if isinstance(times := getattr(text, key, None), int | float):
            vars(text)[key] = times / world  # its class takes whole numbers only
    for each in (config, text):
        each.pad_token_id = 0  # it may be in another part of the vocabulary
    return config


def _owner(tree: torch.nn.Module, place: str) -> torch.nn.Module:
    return tree.get_submodule(place.rpartition(".")[0])


def _numbers(text: Any, keys: Sequence[str]) -> list[tuple[str, int]]:
    found = [(key, getattr(text, key, None)) for key in keys]
    return [(k, v) for k, v in found if isinstance(v, int) and not isinstance(v, bool)]


def _tables(tree: PreTrainedModel) -> set[str]:
    """Names of the parameters of which a rank has a part of the vocabulary."""
    ends = (tree.get_input_embeddings(), tree.get_output_embeddings())
    own = {id(each) for end in ends if end is not None for each in end.parameters()}
    named = tree.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if id(parameter) in own}


def _is_cut(module: torch.nn.Module, part: torch.nn.Module) -> bool:
    both = zip(module.parameters(recurse=False), part.parameters(recurse=False), strict=True)
    return any(_num_cut(*each) for each in both)


def _num_cut(whole: torch.Tensor, part: torch.Tensor) -> int:
    """In how many dimensions a tensor is divided."""
    return sum(size != own for size, own in zip(whole.shape, part.shape, strict=True))


def _check_numbers(name: str, module: torch.nn.Module, part: torch.nn.Module) -> None:
    for key, value in vars(module).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and key not in _OF_SIZES and vars(part).get(key) != value:
            raise _undivided(f"{key} of {name} is {value}, and {vars(part).get(key)} in a part")


def _undivided(what: str) -> ConfigError:
    return ConfigError(f"it cannot be divided among ranks: {what}", param=_PARAM)


def _problem(world: int, what: str) -> ConfigError:
    return ConfigError(f"tensor_parallel_size {world}: {what}", param=_PARAM)
