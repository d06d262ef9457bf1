"""What structured output costs at a vocabulary of 152k: compiling, and each step of a stream.

    python -m benchmarks.bench_grammar [--json benchmarks/results/grammar.json]

Streams follow their grammar along random allowed tokens. A step is the mask of one row (`fill`),
its application to the row's logits on the CPU (`apply`) and the token drawn (`accept`).
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Final, TypeVar

import numpy as np
import torch

from tokenmesh.engine.grammar.backends import make_backend
from tokenmesh.engine.grammar.compile_job import BackendName
from tokenmesh.engine.grammar.matcher import Backend, Grammar, num_words
from tokenmesh.engine.grammar.token_table import TokenTable
from tokenmesh.kernels.grammar_mask import grammar_mask
from tokenmesh.shared.messages.structured import Structured

_Result = TypeVar("_Result")

VOCAB: Final = 151_936
NUM_SPECIAL: Final = 32
STEPS: Final = 2000
LONGEST_WALK: Final = 300
GATE_US: Final = 100.0
_STEP_COLUMNS: Final = (
    "fill_p50_us",
    "fill_p99_us",
    "fill_max_us",
    "apply_p50_us",
    "accept_p50_us",
    "step_p50_us",
)
BACKENDS: Final[tuple[BackendName, ...]] = ("xgrammar", "guidance")

_ORDER: Final = {
    "type": "object",
    "properties": {
        "customer": {"type": "object", "properties": {"name": {"type": "string"}}},
        "lines": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string"},
                    "count": {"type": "integer"},
                    "color": {"enum": ["red", "green", "blue"]},
                },
                "required": ["sku", "count"],
            },
        },
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["customer", "lines"],
}
_QUERY: Final = (
    'root ::= "SELECT " name (", " name)* " FROM " name (" WHERE " name " = " [0-9]+)?\n'
    "name ::= [a-z] [a-z0-9_]*"
)
_JSON: Final = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt/] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= [ \t\n]*
"""
_TAG: Final = {
    "structures": [{"begin": "<call>", "schema": _ORDER, "end": "</call>"}],
    "triggers": ["<call>"],
}
GRAMMARS: Final = {
    "json_object": Structured(kind="json_object"),
    "json schema": Structured(kind="json", text=json.dumps(_ORDER)),
    "regex": Structured(kind="regex", text=r"[A-Z][a-z]+ [A-Z][a-z]+, \d{4}-\d{2}-\d{2}"),
    "choice": Structured(kind="choice", text=json.dumps([f"option {n}" for n in range(100)])),
    "ebnf": Structured(kind="grammar", text=_QUERY),
    "json in ebnf": Structured(kind="grammar", text=_JSON),
    "structural tag": Structured(kind="structural_tag", text=json.dumps(_TAG)),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one grammar in one library; seconds and microseconds."""

    backend: str
    grammar: str
    compile_s: float
    load_s: float
    compiled_bytes: int
    fill_p50_us: float
    fill_p99_us: float
    fill_max_us: float
    apply_p50_us: float
    accept_p50_us: float
    step_p50_us: float


def vocabulary(seed: int = 1) -> TokenTable:
    """Bytes, words, numbers, punctuation and pieces of other scripts, as a byte-level BPE has."""
    rng = Random(seed)
    pieces = {bytes([byte]): None for byte in range(256)}
    letters, weights = "etaoinshrdlucmfwypvbgkjqxz", [1 / (n + 1) for n in range(26)]
    marks = '":,{}[]().-_/\\ \n\t0123456789'
    while len(pieces) < VOCAB - NUM_SPECIAL:
        kind = rng.random()
        if kind < 0.75:
            word = "".join(rng.choices(letters, weights, k=rng.randint(2, 9)))
            word = word.title() if rng.random() < 0.2 else word
            piece = (" " * (rng.random() < 0.5) + word).encode()
        elif kind < 0.85:
            piece = "".join(rng.choices(marks, k=rng.randint(2, 4))).encode()
        else:
            text = "".join(chr(rng.randint(0xC0, 0x9FFF)) for _ in range(rng.randint(1, 3)))
            piece = text.encode()[: rng.randint(2, 6)]
        pieces[piece] = None
    return TokenTable([*pieces, *[b""] * NUM_SPECIAL], (VOCAB - NUM_SPECIAL,))


def measure(backend: Backend, name: BackendName, kind: str, structured: Structured) -> Cost:
    """Compile three times, then follow it for `STEPS` steps."""
    compile_s, data = _median_s(lambda: backend.compile(structured))
    load_s, grammar = _median_s(lambda: backend.load(data))
    fills, applies, accepts = zip(*_walk(grammar, Random(7)), strict=True)
    steps = [sum(each) for each in zip(fills, applies, accepts, strict=True)]
    return Cost(
        backend=name,
        grammar=kind,
        compile_s=round(compile_s, 5),
        load_s=round(load_s, 5),
        compiled_bytes=len(data),
        fill_p50_us=_us(median(fills)),
        fill_p99_us=_us(sorted(fills)[int(0.99 * len(fills))]),
        fill_max_us=_us(max(fills)),
        apply_p50_us=_us(median(applies)),
        accept_p50_us=_us(median(accepts)),
        step_p50_us=_us(median(steps)),
    )


def _walk(grammar: Grammar, rng: Random) -> Iterator[tuple[float, float, float]]:
    """Seconds of fill, apply and accept, step by step; from the beginning again at each end."""
    masks = np.zeros((1, num_words(VOCAB)), dtype=np.int32)
    row = torch.zeros(1, dtype=torch.int32)
    noise = torch.randn(1, VOCAB)
    matcher, length = grammar.start(), 0
    for _ in range(STEPS):
        logits = noise.clone()
        filled_s = _timed(partial(matcher.fill, masks, 0))
        applied_s = _timed(partial(grammar_mask, logits, row, torch.from_numpy(masks)))
        allowed = logits[0].isfinite().nonzero()[:, 0]
        token = int(allowed[rng.randrange(len(allowed))])
        yield filled_s, applied_s, _timed(partial(matcher.accept, token))
        length += 1
        if matcher.is_terminated() or length == LONGEST_WALK:
            matcher, length = grammar.start(), 0


def _timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def _median_s(call: Callable[[], _Result]) -> tuple[float, _Result]:
    times = [_timed(call) for _ in range(3)]
    return median(times), call()


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def run() -> list[Cost]:
    """Every grammar in both libraries, printed as they come."""
    tokens = vocabulary()
    costs = []
    print(_line("library", "grammar", "compile ms", "load ms", *_STEP_COLUMNS))
    for name in BACKENDS:
        began_s = time.perf_counter()
        backend = make_backend(name, tokens)
        print(f"{name}: made in {time.perf_counter() - began_s:.2f} s")
        for kind, structured in GRAMMARS.items():
            cost = measure(backend, name, kind, structured)
            costs.append(cost)
            steps = [getattr(cost, column) for column in _STEP_COLUMNS]
            times = [round(seconds * 1e3, 1) for seconds in (cost.compile_s, cost.load_s)]
            print(_line(name, kind, *times, *steps))
    return costs


def _line(*columns: object) -> str:
    return "".join(f"{column!s:>15}" for column in columns)


def main() -> None:
    """Measure; fails when a median mask costs more than the gate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    costs = run()
    worst = max(cost.fill_p50_us for cost in costs)
    print(f"worst median mask: {worst} us (gate {GATE_US:g})")
    if arguments.json is not None:
        report = {"vocab": VOCAB, "gate_us": GATE_US, "costs": [asdict(cost) for cost in costs]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if worst > GATE_US:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
