"""`tokenmesh quantize`: a quantized copy of a checkpoint."""

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

_MODULE: Final = "tokenmesh.engine.models.quantization.write"


class WeightFormat(StrEnum):
    """The format to which weights are rounded."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"


class RoundingMethod(StrEnum):
    """The method by which weights are rounded."""

    RTN = "rtn"
    GPTQ = "gptq"


_METHOD: Final = typer.Option(
    help="rtn: to the nearest, int4 in groups of 32. gptq: so that products with the inputs of a "
    "calibration change least; int4 and int8 of dense decoders."
)
_CALIBRATION: Final = typer.Option(metavar="FILE", help="gptq: text that the model is run on.")
_TOKENS: Final = typer.Option(
    min=1, max=1 << 20, help="gptq: tokens of the text that are used. Default: 16384."
)
_GROUP_SIZE: Final = typer.Option(
    min=16, max=4096, help="gptq, int4: inputs with one scale, a multiple of 16. Default: 128."
)
_ASYMMETRIC: Final = typer.Option("--asymmetric", help="gptq, int4: with zero points.")
_NO_ACT_ORDER: Final = typer.Option(
    "--no-act-order", help="gptq, int4: round inputs as they are stored, not the largest first."
)


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory, GGUF file or hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory.")],
    to: Annotated[
        WeightFormat,
        typer.Option("--format", help="int8 and fp8: a scale by output; int4: by group of inputs."),
    ] = WeightFormat.INT8,
    method: Annotated[RoundingMethod, _METHOD] = RoundingMethod.RTN,
    calibration: Annotated[Path | None, _CALIBRATION] = None,
    calibration_tokens: Annotated[int | None, _TOKENS] = None,
    group_size: Annotated[int | None, _GROUP_SIZE] = None,
    asymmetric: Annotated[bool, _ASYMMETRIC] = False,
    no_act_order: Annotated[bool, _NO_ACT_ORDER] = False,
) -> None:
    """Write a copy of a checkpoint whose projections are rounded."""
    # in another process: this one does without torch
    command = [sys.executable, "-m", _MODULE, "--format", to.value, "--method", method.value]
    options = {
        "--calibration": calibration,
        "--calibration-tokens": calibration_tokens,
        "--group-size": group_size,
    }
    for name, value in options.items():
        if value is not None:
            command += [name, str(value)]
    for name, is_set in (("--asymmetric", asymmetric), ("--no-act-order", no_act_order)):
        if is_set:
            command.append(name)
    command += ["--", model, str(out)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
