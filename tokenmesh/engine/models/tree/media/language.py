"""The language model of a tree that also has towers, which other services run.

A tower is what is neither the language model nor around it, nor the head: vision and audio
encoders and their projectors.
"""

import re
from collections.abc import Iterator, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from tokenmesh.engine.api.media import AUDIO, IMAGE, VIDEO, MediaItem
from tokenmesh.engine.layers.step import Step
from tokenmesh.engine.media_facts import TEXT_ONLY, MediaFacts
from tokenmesh.engine.models.omni_positions import OMNI, omni_positions
from tokenmesh.engine.models.tree.run import UnservedModel

_STREAMING: Final = "voxtral_realtime"
"""Model type of a language model that writes while it listens."""
_SEES_AHEAD: Final = frozenset({"Gemma3ForConditionalGeneration"})
"""Classes whose masks let the tokens of an image see each other both ways."""
_READS_TOWER: Final = "qwen2_audio"
"""Its code reads the tower's device in every pass, and has no method for embeddings of audio."""
_TYPE_OF: Final = {IMAGE: 1, VIDEO: 2, AUDIO: 3}
"""`mm_token_type_ids` of transformers' processors; text is 0."""
_GRIDS: Final = {IMAGE: "image_grid_thw", VIDEO: "video_grid_thw"}
_FEATURES_OF: Final = {
    IMAGE: "get_image_features",
    VIDEO: "get_video_features",
    AUDIO: "get_audio_features",
}


def language_body(model: PreTrainedModel) -> torch.nn.Module:
    """The part that takes embeddings and keeps something between steps."""
    if not has_towers(model.config):
        whole: torch.nn.Module = model.base_model
        return whole
    body: torch.nn.Module = model.get_decoder()
    return body


def has_towers(config: Any) -> bool:
    """Return whether a config describes more than a language model."""
    return config.get_text_config() is not config and not getattr(
        config, "is_encoder_decoder", False
    )


def without_towers(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A class whose trees lack the towers; their names are in its `tokenmesh_towers`."""
    if hasattr(kind, "tokenmesh_towers"):
        return kind

    def build(self: Any, config: Any, *args: Any, **named: Any) -> None:
        kind.__init__(self, config, *args, **named)
        if has_towers(config):
            towers = list(_towers(self, "", language_body(self)))
            for name in towers:
                parent, _, child = name.rpartition(".")
                delattr(self.get_submodule(parent), child)
                if config.model_type == _READS_TOWER:
                    setattr(self.get_submodule(parent), child, SimpleNamespace(device=None))
            if config.model_type == _STREAMING:
                _give_time(self, language_body(self))
            type(self).tokenmesh_towers = tuple(towers)
            plain = [re.escape(name.removeprefix("model.")) for name in towers]
            ignored = {rf"^(model\.)?{name}\." for name in plain}
            self._keys_to_ignore_on_load_unexpected |= ignored

    named = {"__init__": build, "__module__": kind.__module__, "tokenmesh_towers": ()}
    return type(kind.__name__, (kind,), named)


def _give_time(model: Any, body: Any) -> None:
    """Let the body take the delay by itself, and the model embeddings alone.

    Its layers depend on the delay between a word and its text, which config.json states. Recordings
    are added to the embeddings of all tokens, so transformers' forward does not run without one.
    """
    shell, own = model.base_model, body.forward

    @wraps(own)
    def forward(**named: Any) -> Any:
        embeddings = named["inputs_embeds"]
        delay = embeddings.new_full((1,), shell.config.default_num_delay_tokens)
        return own(t_cond=shell.time_embedding(delay)[None], **named)

    def whole(
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **named: Any,
    ) -> Any:
        """As the shell returns it, of tokens that hear nothing."""
        if inputs_embeds is None:
            inputs_embeds = shell.get_input_embeddings()(input_ids)
        passed = {name: named[name] for name in _PASSED if name in named}
        found = forward(inputs_embeds=inputs_embeds, **passed)
        return SimpleNamespace(**_NONE, last_hidden_state=found.last_hidden_state)

    body.forward, shell.forward = forward, whole


_PASSED: Final = ("attention_mask", "position_ids", "past_key_values", "use_cache")
_NONE: Final[dict[str, None]] = dict.fromkeys(
    (
        *("past_key_values", "hidden_states", "attentions"),
        *("encoder_past_key_values", "padding_cache"),
    )
)


def _towers(module: torch.nn.Module, path: str, body: torch.nn.Module) -> Iterator[str]:
    """Paths of children that do not hold the body; heads are directly in the outermost module."""
    inner = {id(each) for each in body.modules()}
    for name, child in module.named_children():
        where = f"{path}{name}"
        if id(child) in inner or isinstance(child, torch.nn.Linear):
            continue
        if next(child.parameters(), None) is None:  # what it computes follows from config.json
            continue
        if any(each is body for each in child.modules()):
            yield from _towers(child, f"{where}.", body)
        else:
            yield where


def is_of_tower(kind: Any, name: str) -> bool:
    """Return whether a tensor of a checkpoint is a tower's; older checkpoints leave out
    `model.`.
    """
    towers: tuple[str, ...] = getattr(kind, "tokenmesh_towers", ())
    plain = name.removeprefix("model.")
    return any(plain.startswith(f"{tower.removeprefix('model.')}.") for tower in towers)


def stand_in(model: PreTrainedModel, body: torch.nn.Module, other: torch.nn.Module) -> None:
    """Put `other` where the head of the model calls the body, or what is around the body."""
    head = model.get_output_embeddings()
    base = model.base_model
    if base is not model and all(each is not head for each in base.modules()):
        setattr(model, model.base_model_prefix, other)
        return
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is body:
                setattr(parent, name, other)
                return
    raise UnservedModel("its head is not apart from its body")


def media_facts(model: PreTrainedModel) -> MediaFacts:
    """Return what a tree takes besides text, by its config and methods."""
    config = model.config
    if not has_towers(config):
        return TEXT_ONLY
    if config.model_type == _STREAMING:
        return MediaFacts(frozenset({AUDIO}), hears_all=True)
    shell: Any = model.base_model
    kinds = [
        kind
        for kind, method in _FEATURES_OF.items()
        if _has_tower(model, kind, method) and _has_token(config, kind)
    ]
    rows = 1
    if hasattr(shell, "get_rope_index"):
        rows = len(prompt_positions(shell, [0], []))
    vision = getattr(config, "vision_config", None)
    return MediaFacts(
        kinds=frozenset(kinds),
        position_rows=rows,
        num_deepstack=len(getattr(vision, "deepstack_visual_indexes", None) or ()),
        sees_ahead=type(model).__name__ in _SEES_AHEAD,
    )


def _has_tower(model: Any, kind: str, method: str) -> bool:
    """Return whether the class computes embeddings of a kind."""
    has_method = hasattr(model.base_model, method) or hasattr(model, method)
    return has_method or (kind == AUDIO and model.config.model_type == _READS_TOWER)


def _has_token(config: Any, kind: str) -> bool:
    names = (f"{kind}_token_id", f"{kind}_token_index")
    return any(getattr(config, name, None) is not None for name in names)


@torch.inference_mode()
def prompt_positions(
    shell: Any, token_ids: Sequence[int], media: Sequence[MediaItem]
) -> torch.Tensor:
    """Positions [rows, T] by the tree's own rule. Raises ValueError where the grids do not fit."""
    if getattr(shell.config, "model_type", None) in OMNI:
        return omni_positions(shell.config, token_ids, media)
    ids = torch.tensor([token_ids])
    types = torch.zeros_like(ids)
    for item in media:
        for first, end in item.runs():
            types[0, first:end] = _TYPE_OF.get(item.kind, 0)
    named: dict[str, torch.Tensor] = {}
    for kind, name in _GRIDS.items():
        grids = [item.grid for item in media if item.kind == kind]
        if grids:
            named[name] = torch.tensor(grids)
    for name in {name for item in media for name in item.facts}:
        named[name] = torch.tensor([item.facts[name] for item in media if name in item.facts])
    try:
        positions, _ = shell.get_rope_index(ids, mm_token_type_ids=types, **named)
    except Exception as error:  # whatever its code raises about numbers that do not fit
        raise ValueError(f"the media do not fit the prompt: {error}") from error
    found: torch.Tensor = positions[:, 0]
    return found


def media_arguments(
    hidden: torch.Tensor, step: Step, media: MediaFacts
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Positions [1, T] or [rows, 1, T] of a step, and what the tree adds to the outputs of its
    first layers, by its own names."""
    rows = step.media.positions
    positions = step.positions[None] if rows is None else rows[:, None]
    count = media.num_deepstack
    width = (1 + count) * hidden.shape[1]
    deep = [patch for patch in step.media.patches if patch.values.shape[1] == width]
    if not count or not deep:
        return positions, {}
    # the tree adds to tokens by index; here to the whole row, which needs no count of them
    layers = hidden.new_zeros(count, 1, *hidden.shape)
    for patch in deep:
        parts = patch.values[:, hidden.shape[1] :].to(hidden)
        layers[:, 0, patch.tokens] = parts.view(len(parts), count, -1).transpose(0, 1)
    row = torch.zeros(1, dtype=torch.int64, device=hidden.device)
    return positions, {"visual_pos_masks": row, "deepstack_visual_embeds": list(layers)}
