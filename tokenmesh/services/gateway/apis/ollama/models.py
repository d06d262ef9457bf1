"""Models as Ollama's /api/tags, /api/ps and /api/show describe them."""

import hashlib
from collections.abc import Iterable
from typing import Final

from tokenmesh.services.gateway.apis.ollama.writer import rfc3339
from tokenmesh.services.gateway.apis.openai.translation import Json
from tokenmesh.services.gateway.core.mesh.catalog import Catalog
from tokenmesh.shared.clock import wall_s
from tokenmesh.shared.config.on_demand import NEVER
from tokenmesh.shared.messages.beat import ModelCard

_TAG: Final = ":latest"
_NEVER: Final = "2318-01-01T00:00:00Z"
"""When a model leaves the memory by itself, as Ollama writes it for one that stays."""
_FORMAT: Final = "safetensors"


def served_name(given: str, catalog: Catalog) -> str:
    """The name without the tag `:latest`, unless a model has that name."""
    names = {name for card in catalog.all() for name in catalog.names(card)}
    return given if given in names else given.removesuffix(_TAG)


def tags(catalog: Catalog) -> list[Json]:
    """Every model by all of its names, and its adapters."""
    found = [_tag(name, card) for card in catalog.all() for name in catalog.names(card)]
    adapters = [
        _tag(each.name, card, parent=card.name)
        for card in catalog.all()
        for each in catalog.adapters(card)
    ]
    return found + adapters


def running(awake: Iterable[tuple[ModelCard, float]]) -> list[Json]:
    """Models with a worker that is awake, and for how many seconds it stays so when idle."""
    return [
        _tag(card.name, card)
        | {
            "expires_at": _expires_at(seconds),
            "size_vram": 0,
            "context_length": card.max_model_len,
        }
        for card, seconds in awake
    ]


def _expires_at(seconds: float) -> str:
    return _NEVER if seconds == NEVER else rfc3339(wall_s() + seconds)


def show(card: ModelCard, *, calls_tools: bool, thinks: bool) -> Json:
    """Files and templates of a model are not shown: they may be private."""
    capabilities = [
        *(["completion"] if card.generates else []),
        *(["tools"] if calls_tools else []),
        *(["thinking"] if thinks else []),
        *(["vision"] if card.takes_images else []),
        *(["embedding"] if "embed" in card.tasks else []),
    ]
    info: Json = {
        "general.architecture": "tokenmesh",
        "general.basename": card.name,
        "tokenmesh.context_length": card.max_model_len,
        "tokenmesh.embedding_length": card.hidden_size or card.pooled_size,
        "tokenmesh.vocab_size": card.vocab_size,
    }
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(),
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": rfc3339(card.created_s),
    }


def _tag(name: str, card: ModelCard, parent: str = "") -> Json:
    digest = hashlib.sha256(f"{name}\0{card.name}\0{card.created_s}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": rfc3339(card.created_s),
        "size": 0,
        "digest": digest,
        "details": _details(parent),
    }


def _details(parent: str = "") -> Json:
    return {
        "parent_model": parent,
        "format": _FORMAT,
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }
