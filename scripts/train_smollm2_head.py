"""Train an EAGLE-3 head for SmolLM2-135M-Instruct: it is too large for git.

`python scripts/train_smollm2_head.py MODEL OUT` writes questions about everyday topics to
OUT/questions.jsonl and trains on what the model answers, as `tokenmesh train-draft` does; MODEL is
a directory, a GGUF file or a hub id. Questions that the head never sees are in OUT/held_out.jsonl.
The training was not timed with this list of questions. A run that was stopped keeps its answers.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from random import Random
from typing import Final

from tokenmesh.engine.training.__main__ import main as train

NUM_QUESTIONS: Final = 720
NUM_HELD_OUT: Final = 40
TOPICS: Final = tuple(
    """bread, bicycles, gravity, a city by the sea, autumn leaves, friendship, a first job,
    volcanoes, the moon, honey bees, photosynthesis, the French Revolution, chess, jazz music,
    recycling, earthquakes, dinosaurs, the Roman Empire, football, gardening, coffee, tea, whales,
    computers,
    programming in Python, algebra, probability, the human heart, sleep, exercise, healthy food,
    the desert, rain forests, rivers, mountains, snow, storms, stars, black holes, rockets,
    airplanes, trains, batteries, solar panels, clocks, poetry, painting, photography, cinema,
    the violin, a teacher, a doctor, a farmer, a detective, a dragon, a robot, a cat, an owl,
    butterflies, trees, the ocean, islands, castles, bridges, money, democracy, languages, memory,
    dreams, courage, patience, cooking pasta, chocolate, cheese, salt, water, fire, glass, steel,
    holidays, maps, camping, swimming, tennis, vaccines, bacteria, evolution, fossils, atoms,
    magnets, electricity, light, sound, telescopes, the printing press, the telephone, radio,
    databases, sorting algorithms, encryption, operating systems""".replace("\n    ", " ").split(
        ", "
    )
)
QUESTIONS: Final = (
    "Tell a story about {}.",
    "Explain how {} works or what it is.",
    "Describe {}.",
    "Why is {} important?",
    "What should a beginner know about {}?",
    "Give five facts about {}.",
    "Give advice about {}.",
    "Write a short poem about {}.",
    "What are the advantages and disadvantages of {}?",
    "Summarize what is known about {} in a paragraph.",
)


def questions() -> tuple[list[str], list[str]]:
    """Those to learn from, and those that are held out, in an order that is always the same."""
    asked = [question.format(topic) for topic, question in product(TOPICS, QUESTIONS)]
    Random(7).shuffle(asked)
    return asked[:NUM_QUESTIONS], asked[NUM_QUESTIONS:][:NUM_HELD_OUT]


def main() -> int:
    """Write the questions and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name, asked in zip(("questions", "held_out"), questions(), strict=True):
        lines = (json.dumps({"messages": [{"role": "user", "content": each}]}) for each in asked)
        (given.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    texts = str(given.out / "questions.jsonl")
    sizes = ["--tokens", "5120", "--max-length", "320"]
    return train([given.model, texts, str(given.out), *sizes])


if __name__ == "__main__":
    raise SystemExit(main())
