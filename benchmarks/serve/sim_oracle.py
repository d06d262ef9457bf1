"""Computes in the client what a stream of the `sim` engine must contain.

The engine draws the token at a position from prompt, seed and position alone (see
engine/core/sim.py). Requests restrict it to a few ids whose texts have one length, so that
equal texts mean equal tokens: none lost, none doubled, none of another stream.
"""

from collections import Counter
from dataclasses import dataclass

import msgspec

from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.workload import tokenize
from tokenmesh.engine.core.sim import SimVocabulary, prompt_key, sim_token
from tokenmesh.shared.messages.sampling import SamplingParams

_NO_VOCABULARY = SimVocabulary(0)
"""No ids of its own: a stream draws from its `allowed_token_ids`."""
_TEXT = " a b c d e f g h i j k l m n o p q r s t u v w x y z"


class _Detokenized(msgspec.Struct):
    prompt: str


@dataclass(frozen=True, slots=True)
class SimOracle:
    """The ids that streams are restricted to, and the text of each."""

    text_by_id: dict[int, str]

    @classmethod
    async def learn(cls, server: Target, model: str) -> "SimOracle":
        """Ask the server for ids and texts. Raises ValueError when they do not just add up."""
        ids = sorted(set(await tokenize(server, model, _TEXT)))
        texts = {each: await _detokenize(server, model, [each]) for each in ids}
        length = Counter(map(len, texts.values())).most_common(1)[0][0]
        chosen = {each: text for each, text in texts.items() if len(text) == length}
        together = await _detokenize(server, model, [*chosen, *reversed(chosen)])
        expected = "".join(chosen.values()) + "".join(reversed(chosen.values()))
        if together != expected or len(set(chosen.values())) < len(chosen):
            raise ValueError(f"the texts of tokens depend on each other: {together!r}")
        return cls(chosen)

    def body(self, prompt_ids: list[int], seed: int) -> dict[str, object]:
        """Return the fields of a request besides model and length."""
        return {"prompt": prompt_ids, "seed": seed, "allowed_token_ids": [*self.text_by_id]}

    @property
    def token_chars(self) -> int:
        """Length of any token's text."""
        return len(next(iter(self.text_by_id.values())))

    def text(self, prompt_ids: list[int], seed: int, num_tokens: int) -> str:
        """The text that the stream must have."""
        key = prompt_key(prompt_ids)
        return "".join(self._token(key, seed, position) for position in range(num_tokens))

    def seeds_writing(self, text: str, prompt_ids: list[int], seeds: list[int]) -> list[int]:
        """Those of `seeds` whose streams begin with a text."""
        key, chars = prompt_key(prompt_ids), self.token_chars
        for position in range(len(text) // chars):
            token = text[position * chars : (position + 1) * chars]
            seeds = [seed for seed in seeds if self._token(key, seed, position) == token]
        return seeds

    def _token(self, key: bytes, seed: int, position: int) -> str:
        allowed = [*self.text_by_id]
        sampling = SamplingParams(seed=seed, max_tokens=1, allowed_token_ids=allowed)
        return self.text_by_id[sim_token(key, sampling, position, _NO_VOCABULARY)]


async def _detokenize(server: Target, model: str, ids: list[int]) -> str:
    body = {"model": model, "tokens": ids}
    answer = await server.fetch("POST", "/detokenize", body)
    return msgspec.json.decode(answer, type=_Detokenized).prompt
