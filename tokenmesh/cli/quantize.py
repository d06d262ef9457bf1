"""`tokenmesh quantize`: a quantized copy of a checkpoint."""

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

_MODULE: Final = "tokenmesh.services.worker_svc.models.quantization.write"


class WeightFormat(StrEnum):
    """What weights are rounded to."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory, GGUF file or hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory.")],
    to: Annotated[
        WeightFormat,
        typer.Option("--format", help="int8 and fp8: a scale by output; int4: by 32 inputs."),
    ] = WeightFormat.INT8,
) -> None:
    """Write a copy of a checkpoint whose projections are rounded to the nearest."""
    # in another process: this one does without torch
    command = [sys.executable, "-m", _MODULE, model, str(out), to.value]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
