"""`tokenmesh train-draft`: a head that drafts for a model, fitted to what the model answers."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

_MODULE: Final = "tokenmesh.engine.training"

_STEPS: Final = typer.Option(min=1, max=8, help="Tokens ahead that it learns to guess.")
_TOKENS: Final = typer.Option(min=256, help="How many of the most frequent tokens it can draft.")
_EPOCHS: Final = typer.Option(min=1, max=100, help="How often it learns from each answer.")
_MAX_TOKENS: Final = typer.Option("--max-tokens", min=8, help="Longest answer to a text.")
_MAX_LENGTH: Final = typer.Option(
    "--max-length", min=32, help="Tokens of a text with its answer that it learns from."
)


def train_draft(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory, GGUF file or hub id.")],
    texts: Annotated[
        Path,
        typer.Argument(
            metavar="TEXTS",
            help="What the model is asked: a text in each line, or JSON with messages or a prompt.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory of the head.")],
    steps: Annotated[int, _STEPS] = 3,
    tokens: Annotated[int, _TOKENS] = 4096,
    epochs: Annotated[int, _EPOCHS] = 3,
    max_tokens: Annotated[int, _MAX_TOKENS] = 256,
    max_length: Annotated[int, _MAX_LENGTH] = 512,
) -> None:
    """Fit an EAGLE-3 head to the model's own answers, on this machine's CPU."""
    options = {
        "--steps": steps,
        "--tokens": tokens,
        "--epochs": epochs,
        "--max-tokens": max_tokens,
        "--max-length": max_length,
    }
    command = [sys.executable, "-m", _MODULE]
    for name, value in options.items():
        command += [name, str(value)]
    # in another process: this one does without torch
    command += ["--", model, str(texts), str(out)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
