"""`tokenmesh plan`: over how many devices a model can be divided, and what that would give."""

import json
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tokenmesh.cli.flags import name_models
from tokenmesh.shared.config import load_settings

_MODULE: Final = "tokenmesh.engine.capacity"
_GPUS: Final = typer.Option(metavar="NxNAME", help="GPUs, such as 8xH100, or 4x48GiB by memory.")
_CPUS: Final = typer.Option(metavar="NxGIB", help="Hosts or NUMA nodes with so much free memory.")
_BANDWIDTH: Final = typer.Option(min=0.1, help="GB/s of a device's memory, instead of its maker's.")
_TFLOPS: Final = typer.Option(min=0.001, help="Products of a device, instead of its maker's.")
_TOKENS: Final = typer.Option(min=1, help="Tokens of a stream on average, for the speeds.")
_CONFIG: Final = typer.Option(help="TOML file with settings.")


class PlanFormat(StrEnum):
    """The form of the answer."""

    TABLE = "table"
    JSON = "json"


def plan(
    model_tag: Annotated[str, typer.Argument(metavar="MODEL", help="Directory, GGUF or hub id.")],
    gpus: Annotated[str | None, _GPUS] = None,
    cpus: Annotated[str | None, _CPUS] = None,
    bandwidth: Annotated[float | None, _BANDWIDTH] = None,
    tflops: Annotated[float | None, _TFLOPS] = None,
    tokens: Annotated[int, _TOKENS] = 1024,
    form: Annotated[PlanFormat, typer.Option("--format")] = PlanFormat.TABLE,
    config: Annotated[Path | None, _CONFIG] = None,
    *,
    overrides: dict[str, Any],
) -> None:
    """Show which divisions of a model fit devices, and what they would give, by a cost model."""
    name_models(overrides, [model_tag])
    settings = load_settings(config, overrides)
    question = {
        "model": settings.models[0].model_dump(mode="json"),
        "worker": settings.worker.model_dump(mode="json"),
        "gpus": gpus,
        "cpus": cpus,
        "bandwidth": bandwidth,
        "tflops": tflops,
        "tokens": tokens,
        "is_json": form is PlanFormat.JSON,
    }
    # in another process: this one does without torch
    command = [sys.executable, "-m", _MODULE]
    asked = json.dumps(question).encode()
    raise typer.Exit(subprocess.run(command, input=asked, check=False).returncode)
