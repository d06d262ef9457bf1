"""Train the demo model that ships with TokenMesh, or evaluate a checkpoint of it.

Trains, writes and evaluates; with `--evaluate` it only evaluates what `--out` holds. Needs the
repository installed (`make install`).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from scripts.demo_model.evaluate import Judge, evaluate
from scripts.demo_model.head_start import give_head_start
from scripts.demo_model.mixture import make_dialog
from scripts.demo_model.network import TRAINING_ATTENTION, build_network
from scripts.demo_model.packing import SampleMaker
from scripts.demo_model.rendering import ChatTemplate
from scripts.demo_model.tokenizer import save_tokenizer, train_tokenizer
from scripts.demo_model.training import Recipe, train

_SHIPPED = Path(__file__).parent.parent / "tokenmesh" / "demo_model"
_TOKENIZER_DIALOGS = 8000
_EASY_STEPS = 600
_REQUIRED = {"sums": 0.95, "tool calls": 0.95, "one-digit sums": 0.99, "about itself": 0.95}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=_SHIPPED, help="checkpoint folder")
    parser.add_argument("--evaluate", action="store_true", help="do not train")
    parser.add_argument("--resume", action="store_true", help="train what --out holds further")
    parser.add_argument(
        "--average", type=Path, help="do not train: mix in this checkpoint's weights"
    )
    parser.add_argument("--share", type=float, default=0.5, help="of the weights mixed in")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3812)
    parser.add_argument("--rate", type=float, default=1.0, help="of the usual learning rates")
    parser.add_argument("--minutes", type=float, default=60.0, help="longest training time")
    parser.add_argument("--dialogs", type=int, default=10, help="dialogs a step")
    parser.add_argument("--save-every", type=float, default=3.0, metavar="MINUTES")
    parser.add_argument("--cases", type=int, default=300, help="evaluation cases a task")
    return parser.parse_args()


def _save(network: LlamaForCausalLM, folder: Path) -> None:
    """Write a bf16 copy; the network itself stays in fp32."""
    weights = {name: value.cpu().bfloat16() for name, value in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    network.config.architectures = [type(network).__name__]
    network.config.dtype = torch.bfloat16
    network.config.save_pretrained(folder)
    network.generation_config.save_pretrained(folder)
    # transformers writes no temperature with `do_sample: false`; servers read no other.
    generation = folder / "generation_config.json"
    values = json.loads(generation.read_text()) | {"temperature": 0.0}
    generation.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _begin(options: argparse.Namespace) -> tuple[Tokenizer, LlamaForCausalLM]:
    """A new tokenizer, written to the folder, and a new network with a head start."""
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    template = folder / "chat_template.jinja"
    if not template.exists():
        template.write_text((_SHIPPED / template.name).read_text())
    chat, rng = ChatTemplate(template), Random(options.seed + 1)
    tokenizer = train_tokenizer(chat.render(make_dialog(rng)) for _ in range(_TOKENIZER_DIALOGS))
    save_tokenizer(tokenizer, folder)
    network = build_network(tokenizer)
    give_head_start(network, tokenizer)
    return tokenizer, network


def _continue(options: argparse.Namespace) -> tuple[Tokenizer, LlamaForCausalLM]:
    """The folder's tokenizer and network; the optimizers begin anew."""
    network = AutoModelForCausalLM.from_pretrained(
        options.out, dtype=torch.float32, attn_implementation=TRAINING_ATTENTION
    )
    return Tokenizer.from_file(str(options.out / "tokenizer.json")), network


def _train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    folder: Path = options.out
    tokenizer, network = _continue(options) if options.resume else _begin(options)
    network.to(options.device)
    saved = time.monotonic()

    def save_now_and_then(step: int) -> None:
        nonlocal saved
        if time.monotonic() - saved > 60 * options.save_every:
            _save(network, folder)
            saved = time.monotonic()

    recipe = Recipe(
        seed=options.seed,
        steps=options.steps,
        rate=options.rate,
        minutes=options.minutes,
        dialogs_per_step=options.dialogs,
        easy_steps=0 if options.resume else _EASY_STEPS,
        device=options.device,
    )
    taken = train(
        network, SampleMaker(tokenizer, folder / "chat_template.jinja"), recipe, save_now_and_then
    )
    _save(network, folder)
    print(f"trained {taken} steps: {recipe}")


def _average(folder: Path, other: Path, share: float) -> None:
    """Replace the weights of `folder` by their mean with those of another run from it."""
    name = "model.safetensors"
    mine, theirs = load_file(folder / name), load_file(other / name)
    mean = {key: mine[key].float().lerp(theirs[key].float(), share).bfloat16() for key in mine}
    save_file(mean, folder / name, metadata={"format": "pt"})


def _evaluate(options: argparse.Namespace) -> bool:
    """Return whether the required tasks are good enough in fp32 and in bf16."""
    tokenizer, good = AutoTokenizer.from_pretrained(options.out), True
    for dtype in (torch.float32, torch.bfloat16):
        print(f"{options.out} in {dtype}, {options.cases} cases a task:")
        network = AutoModelForCausalLM.from_pretrained(options.out, dtype=dtype)
        network.to(options.device).eval()
        judge = Judge(network, tokenizer, options.out / "chat_template.jinja")
        scores = evaluate(judge, options.cases, options.seed)
        good = good and all(scores[task] >= share for task, share in _REQUIRED.items())
    return good


def main() -> None:
    """Train, unless `--evaluate` or `--average` is set, then evaluate.

    Exits with 1 if a required task fails.
    """
    options = _arguments()
    torch.set_num_threads(options.threads)
    if options.average is not None:
        _average(options.out, options.average, options.share)
    elif not options.evaluate:
        _train(options)
    if not _evaluate(options):
        raise SystemExit("the model is below 95 % on a required task")


if __name__ == "__main__":
    main()
