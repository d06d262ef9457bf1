"""ItemProcessor: a checkpoint's own processor for one item at a time, in pillow and numpy.

transformers' processor class makes the features and the text that stands for the item. It is used
without its video processor, which needs torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy
from PIL import Image

from tokenmesh.services.tokenizer_svc.loading import check_has_tokenizer, read_json
from tokenmesh.services.tokenizer_svc.render_job import JsonObject
from tokenmesh.shared.errors import CheckpointError, InvalidInput
from tokenmesh.shared.tensor_blob import TensorBlob, encode_named

_OF_TEXT: Final = frozenset(
    {
        *("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"),
        "text_replacement_offsets",
    }
)
"""What a processor returns that is not about the item."""
_PARTS: Final = frozenset(
    {
        *("image_processor", "video_processor", "feature_extractor", "tokenizer", "chat_template"),
        *("processor_class", "auto_map"),
    }
)
"""Keys of processor_config.json that are no options of the class."""
_CHANGEABLE: Final = frozenset(
    {
        *("size", "min_pixels", "max_pixels"),
        *("crop_to_patches", "min_patches", "max_patches"),
        *("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"),
        "pan_and_scan_min_ratio_to_activate",
    }
)
"""Options that a request may set: how large an image is and into how many it is cut. Others would
make what the tower was not trained on."""
_DTYPES: Final = {"f": "float32", "i": "int64", "u": "int64", "b": "bool"}


class ItemText(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item as a prompt holds it, without its features."""

    text: str
    """What stands for it; of equal tokens that take embeddings and follow each other, one."""
    runs: list[int]
    """How many each of them stands for."""
    grid: tuple[int, ...] = ()
    facts: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """One item and its features, an encoded blob of named tensors."""

    prepared: ItemText
    features: bytes

    def encode(self) -> bytes:
        head = msgspec.json.encode(self.prepared)
        return b"".join((len(head).to_bytes(4, "little"), head, self.features))

    @classmethod
    def decode(cls, data: bytes) -> "PreparedItem":
        end = 4 + int.from_bytes(data[:4], "little")
        return cls(msgspec.json.decode(data[4:end], type=ItemText), data[end:])


def embed_ids(config: JsonObject) -> frozenset[int]:
    """The ids of tokens that take embeddings."""
    names = [f"{kind}_token_{end}" for kind in ("image", "video") for end in ("id", "index")]
    found = {config.get(name) for name in names}
    return frozenset(each for each in found if isinstance(each, int) and each >= 0)


class ItemProcessor:
    """Of one checkpoint. Raises CheckpointError for one whose processor cannot be used."""

    def __init__(self, directory: Path) -> None:
        self._config = read_json(directory / "config.json")
        self._processor: Any = _load(directory, self._config)
        tokenizer = self._processor.tokenizer
        texts = [tokenizer.convert_ids_to_tokens(each) for each in sorted(embed_ids(self._config))]
        self._embeds = [text for text in texts if text]
        self.placeholder: str = self._processor.image_token
        images = self._processor.image_processor
        rest = {name: _plain(value) for name, value in vars(self._processor).items()}
        rest = {name: value for name, value in rest.items() if name not in _PARTS}
        self.options = msgspec.json.encode([images.to_dict(), rest], order="sorted")
        """All options that change a result."""
        known = set(getattr(type(images), "valid_kwargs", SimpleNamespace).__annotations__)
        self._known = _CHANGEABLE & (known | set(vars(images)))

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise InvalidInput for options of a request that the processor does not know."""
        for name in options:
            if name not in self._known:
                known = ", ".join(sorted(self._known))
                raise InvalidInput(
                    f"mm_processor_kwargs: the model's image processor has no option {name!r}; "
                    f"it has {known}",
                    param="mm_processor_kwargs",
                )

    def image(self, image: Image.Image, options: Mapping[str, Any]) -> PreparedItem:
        """Raises ValueError, TypeError and the like for what cannot be processed."""
        found = self._processor(
            images=[image],
            text=[self.placeholder],
            return_tensors="np",
            return_text_replacement_offsets=True,
            **options,
        )
        (offsets,) = found["text_replacement_offsets"]
        (replaced,) = offsets
        tensors = {
            name: numpy.asarray(value) for name, value in found.items() if name not in _OF_TEXT
        }
        grid = tensors.get("image_grid_thw")
        text, runs = self._collapsed(replaced["replacement"])
        prepared = ItemText(text, runs, () if grid is None else tuple(map(int, grid[0])))
        named = {name: _blob(value) for name, value in tensors.items()}
        return PreparedItem(prepared, encode_named(named))

    def _collapsed(self, text: str) -> tuple[str, list[int]]:
        pieces, runs, at = [], [], 0
        while at < len(text):
            starts = [(text.find(each, at), each) for each in self._embeds]
            first, token = min(((s, t) for s, t in starts if s >= 0), default=(-1, ""))
            if first < 0:
                break
            count, end = 0, first
            while text.startswith(token, end):
                count, end = count + 1, end + len(token)
            pieces += [text[at:first], token]
            runs.append(count)
            at = end
        return "".join([*pieces, text[at:]]), runs


def _blob(value: numpy.ndarray) -> TensorBlob:
    dtype = _DTYPES[value.dtype.kind]
    little = numpy.ascontiguousarray(value, dtype=numpy.dtype(dtype).newbyteorder("<"))
    return TensorBlob(dtype, little.shape, little.tobytes())


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool | list) else None


def _load(directory: Path, config: JsonObject) -> Any:
    from transformers import AutoImageProcessor, AutoTokenizer

    check_has_tokenizer(directory)
    settings = read_json(directory / "processor_config.json")
    if not (directory / "preprocessor_config.json").is_file() and (
        "image_processor" not in settings
    ):
        raise CheckpointError(f"{directory} holds no preprocessor_config.json")
    try:
        images = AutoImageProcessor.from_pretrained(
            directory, backend="pil", trust_remote_code=False, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=False, local_files_only=True
        )
        kind = _without_checks(_class_of(directory, config, settings))
        options = {**_defaults(config), **{k: v for k, v in settings.items() if k not in _PARTS}}
        parts = {"image_processor": images, "tokenizer": tokenizer}
        if "video_processor" in kind.get_attributes():
            parts["video_processor"] = SimpleNamespace()
        return kind(**parts, **options)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a processor's class raises about its config
        what = f"its processor cannot be loaded: {type(error).__name__}: {error}"
        raise CheckpointError(f"{directory}: {what}"[:1000]) from error


def _class_of(directory: Path, config: JsonObject, settings: JsonObject) -> Any:
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    from tokenmesh.services.tokenizer_svc.media.pixtral import RowsProcessor

    stated = [settings, read_json(directory / "preprocessor_config.json")]
    names = [each.get("processor_class") for each in stated]
    names.append(PROCESSOR_MAPPING_NAMES.get(str(config.get("model_type"))))
    name = next((each for each in names if isinstance(each, str)), None)
    if name is None:
        raise CheckpointError(f"{directory}: transformers has no processor for it")
    if name == "PixtralProcessor":  # transformers' own imports torch
        return RowsProcessor
    return getattr(transformers, name)


def _without_checks(kind: Any) -> Any:
    """The class, taking a stand-in for its video processor and a placeholder alone as the text."""

    def accept(_self: Any, *_args: Any, **_named: Any) -> None:
        """What is given is what the class wants."""

    members = {"check_argument_for_proper_class": accept, "validate_inputs": accept}
    return type(kind.__name__, (kind,), members)


def _defaults(config: JsonObject) -> JsonObject:
    """Options that old checkpoints of llava leave out of their processor's config."""
    vision = config.get("vision_config")
    if config.get("model_type") != "llava" or not isinstance(vision, dict):
        return {}
    strategy = config.get("vision_feature_select_strategy", "default")
    return {
        # CLIPVisionConfig's own default
        "patch_size": vision.get("patch_size", 32),
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": int(vision.get("model_type") == "clip_vision_model"),
    }


def read_options(data: bytes) -> dict[str, Any]:
    """The options of a request; raises InvalidInput."""
    try:
        options = json.loads(data) if data else {}
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            "mm_processor_kwargs is not JSON", param="mm_processor_kwargs"
        ) from error
    if not isinstance(options, dict):
        raise InvalidInput("mm_processor_kwargs is not an object", param="mm_processor_kwargs")
    return options
