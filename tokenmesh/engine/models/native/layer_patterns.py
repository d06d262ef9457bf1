"""Know which layers slide a window and which know positions, by family."""

from tokenmesh.engine.models.native.config import LayerConfig
from tokenmesh.engine.models.raw_config import RawConfig

FULL = "full_attention"
SLIDING = "sliding_attention"


def layer_types(raw: RawConfig, count: int, window: int | None) -> list[str] | None:
    """The checkpoint's `layer_types`, checked; None when it has none."""
    types = raw.sequence("layer_types", count)
    for kind in types or ():
        if kind not in (FULL, SLIDING):
            raise raw.error("layer_types", f"holds {kind!r}; supported are {FULL}, {SLIDING}")
        if kind == SLIDING and window is None:
            raise raw.error("layer_types", f"holds {SLIDING}, but sliding_window is not in use")
    return types


def full(raw: RawConfig, count: int) -> tuple[LayerConfig, ...]:
    """Every layer sees everything (Llama, Granite, Olmo2, Glm4, ...)."""
    if raw.get("sliding_window") is not None:
        raise raw.error("sliding_window", "is set; layers of this family slide no window")
    layer_types(raw, count, None)
    return (LayerConfig(window=None, rope=0),) * count


def window_everywhere(raw: RawConfig, count: int) -> tuple[LayerConfig, ...]:
    """The same window in every layer when there is one (Phi3, Ministral3)."""
    window = _window(raw)
    kind = FULL if window is None else SLIDING
    if any(each != kind for each in layer_types(raw, count, window) or ()):
        raise raw.error("layer_types", f"differ; every layer of this family is {kind} here")
    return (LayerConfig(window=window, rope=0),) * count


def window_by_type(raw: RawConfig, count: int) -> tuple[LayerConfig, ...]:
    """A window where `layer_types` says so, else in every layer (Mistral, Ministral)."""
    window = _window(raw)
    types = layer_types(raw, count, window) or [FULL if window is None else SLIDING] * count
    return tuple(_typed(kind, window) for kind in types)


def window_when_used(raw: RawConfig, count: int) -> tuple[LayerConfig, ...]:
    """A window only with use_sliding_window, from layer max_window_layers on (Qwen2, Qwen3)."""
    window = _used_window(raw)
    first = raw.integer("max_window_layers", count, minimum=0)
    by_number = [SLIDING if i >= first else FULL for i in range(count)]
    types = layer_types(raw, count, window) or by_number
    return tuple(_typed(kind, window) for kind in types)


def rope_interval(raw: RawConfig, count: int) -> tuple[LayerConfig, ...]:
    """Every n-th layer has no positions (SmolLM3)."""
    interval = raw.integer("no_rope_layer_interval", 4)
    has_rope = raw.sequence("no_rope_layers", count)
    if has_rope is None:
        has_rope = [(i + 1) % interval != 0 for i in range(count)]
    window = _used_window(raw)
    types = layer_types(raw, count, window) or [FULL if flag else SLIDING for flag in has_rope]
    return tuple(
        LayerConfig(window=window if kind == SLIDING else None, rope=0 if flag else None)
        for kind, flag in zip(types, has_rope, strict=True)
    )


def rope_by_type(raw: RawConfig, count: int) -> tuple[LayerConfig, ...]:
    """Three sliding layers, one full; ropes[0] serves full layers, ropes[1] sliding (Olmo3)."""
    window = _window(raw)
    types = layer_types(raw, count, window) or [
        FULL if (i + 1) % 4 == 0 else SLIDING for i in range(count)
    ]
    return tuple(
        LayerConfig(window=window, rope=1) if kind == SLIDING else LayerConfig(None, 0)
        for kind in types
    )


def rope_where_sliding(raw: RawConfig, count: int) -> tuple[LayerConfig, ...]:
    """Full layers have no positions in a model that also slides (Exaone4)."""
    window = _window(raw)
    types = layer_types(raw, count, window)
    if window is None:
        return (LayerConfig(window=None, rope=0),) * count
    if types is None:
        pattern = raw.integer("sliding_window_pattern", 4)
        types = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count)]
    return tuple(
        LayerConfig(window=window, rope=0) if kind == SLIDING else LayerConfig(None, None)
        for kind in types
    )


def _typed(kind: str, window: int | None) -> LayerConfig:
    return LayerConfig(window=window if kind == SLIDING else None, rope=0)


def _window(raw: RawConfig) -> int | None:
    return None if raw.get("sliding_window") is None else raw.integer("sliding_window")


def _used_window(raw: RawConfig) -> int | None:
    window = _window(raw)
    return window if raw.flag("use_sliding_window") else None
