"""What a stream of the `sim` engine must say, worked out by the client itself.

The engine draws the token at a position from prompt, seed and position alone (see
worker_svc/engine/sim.py). Requests restrict it to a few ids whose texts have one length, so that
equal texts mean equal tokens: none lost, none doubled, none of another stream.
"""

from collections import Counter
from dataclasses import dataclass

import msgspec

from benchmarks.serve.client import Server
from benchmarks.serve.workload import tokenize
from tokenmesh.services.worker_svc.engine.sim import SimVocabulary, prompt_key, sim_token
from tokenmesh.shared.messages.sampling import SamplingParams

_TEXT = " a b c d e f g h i j k l m n o p q r s t u v w x y z"


class _Detokenized(msgspec.Struct):
    prompt: str


@dataclass(frozen=True, slots=True)
class SimOracle:
    """The ids that streams are restricted to, and the text of each."""

    text_by_id: dict[int, str]

    @classmethod
    async def learn(cls, server: Server, model: str) -> "SimOracle":
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
        """What a request must say besides model and length."""
        return {"prompt": prompt_ids, "seed": seed, "allowed_token_ids": [*self.text_by_id]}

    def text(self, prompt_ids: list[int], seed: int, num_tokens: int) -> str:
        """What the stream must say."""
        allowed = [*self.text_by_id]
        sampling = SamplingParams(seed=seed, max_tokens=num_tokens, allowed_token_ids=allowed)
        key, vocabulary = prompt_key(prompt_ids), SimVocabulary(max(allowed) + 1)
        return "".join(
            self.text_by_id[sim_token(key, sampling, position, vocabulary)]
            for position in range(num_tokens)
        )


async def _detokenize(server: Server, model: str, ids: list[int]) -> str:
    body = {"model": model, "tokens": ids}
    answer = await server.ask("POST", "/detokenize", body)
    return msgspec.json.decode(answer, type=_Detokenized).prompt
