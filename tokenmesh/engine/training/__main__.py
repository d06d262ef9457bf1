"""python -m tokenmesh.engine.training: see `tokenmesh train-draft`."""

import argparse
import logging
import sys
from pathlib import Path

from tokenmesh.engine.exec.runner import TorchRunner
from tokenmesh.engine.llm import LLM
from tokenmesh.engine.models.location import locate
from tokenmesh.engine.training.answers import answer, prompts_of, read_answers
from tokenmesh.engine.training.fit import Fit, FitSettings, save
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.errors import TokenMeshError

logger = logging.getLogger(__name__)

ANSWERS = "answers.jsonl"


def main(words: list[str]) -> int:
    defaults = FitSettings()
    parser = argparse.ArgumentParser(prog="tokenmesh train-draft")
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--tokens", type=int, default=defaults.num_tokens)
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--rate", type=float, default=defaults.rate)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-length", type=int, default=defaults.max_length)
    given = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    settings = FitSettings(given.steps, given.tokens, given.epochs, given.rate, given.max_length)
    try:
        train(given.model, given.texts, given.out, settings, given.max_tokens)
    except (TokenMeshError, OSError) as error:
        logger.error("%s", error)
        return 2
    return 0


def train(model: str, texts: Path, out: Path, settings: FitSettings, max_tokens: int) -> None:
    """Answers go to a file in `out`: a run that was stopped goes on from there."""
    llm = LLM(model, max_num_seqs=32, max_model_len=max(2048, settings.max_length), device="cpu")
    prompts = prompts_of(texts, llm)
    out.mkdir(parents=True, exist_ok=True)
    for done in answer(prompts, llm, out / ANSWERS, max_tokens):
        logger.info("%d of %d answers", done, len(prompts))
    runner = llm.loaded.runner
    assert isinstance(runner, TorchRunner)
    fit = Fit(runner, locate(ModelSettings(model=model)), settings)
    for head, ids in fit.run(read_answers(out / ANSWERS)):
        save(head, ids, runner, fit.taps, out)
        logger.info("written: %s", out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
