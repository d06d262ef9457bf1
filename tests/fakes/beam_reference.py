"""Beam search by vLLM's rules, written down plainly, on distributions made up from a seed."""

from math import log
from random import Random

from tokenmesh.shared.messages.tokens import TokenLogprobs

VOCAB = 9
"""Tokens that any distribution gives a chance, from 0 on."""

Answer = tuple[tuple[int, ...], float, str]
"""Tokens, the sum of their log-probabilities, why it ended."""


def next_token(seed: int, prefix: tuple[int, ...], count: int) -> TokenLogprobs:
    """A random distribution over the vocabulary for each prefix; its best tokens."""
    rng = Random(f"{seed} {prefix}")
    weights = [rng.random() ** 3 + 1e-9 for _ in range(VOCAB)]
    logprobs = {token: log(weight / sum(weights)) for token, weight in enumerate(weights)}
    ids = sorted(logprobs, key=lambda token: -logprobs[token])[:count]
    values = [logprobs[token] for token in ids]
    return TokenLogprobs(ids[0], values[0], 1, ids, values)


def reference(
    seed: int, width: int, num_prompt: int, max_tokens: int, penalty: float, ends: frozenset[int]
) -> list[Answer]:
    """All steps are taken, everything is kept and compared at the end."""
    beams: list[Answer] = [((), 0.0, "length")]
    complete: list[Answer] = []
    for _ in range(max_tokens):
        grown: list[Answer] = []
        for ids, total, _ in beams:
            entry = next_token(seed, ids, 2 * width)
            for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
                is_end = token in ends
                longer = ((*ids, token), total + logprob, "stop" if is_end else "length")
                (complete if is_end else grown).append(longer)
        beams = sorted(grown, key=lambda beam: beam[1], reverse=True)[:width]

    def score(beam: Answer) -> float:
        ids, total, finish = beam
        length = num_prompt + len(ids) - (finish == "stop")
        return float(total / length**penalty)

    return sorted([*complete, *beams], key=score, reverse=True)[:width]
