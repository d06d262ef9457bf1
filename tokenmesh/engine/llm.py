"""LLM: the engine in this process, without a mesh. For scripts, tests and benchmarks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmesh.engine.api.pooling import PoolingParams
from tokenmesh.engine.api.sampling import SamplingParams
from tokenmesh.engine.api.structured import Structured
from tokenmesh.engine.api.tokens import FinishReason, TokenLogprobs
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.run_to_end import FinishedRequest, run_to_end
from tokenmesh.engine.exec.build_any import build
from tokenmesh.engine.grammar.compile_here import LocalCompiler
from tokenmesh.engine.grammar.matcher import CannotCompile, Grammar
from tokenmesh.engine.local_tokenizer import Conversation, LocalTokenizer
from tokenmesh.engine.models.location import locate_tokenizer
from tokenmesh.engine.models.pooling.facts import PoolingFacts
from tokenmesh.engine.request.check import check_length, check_sampling, in_range
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey
from tokenmesh.engine.speculate.proposer import make_proposer
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.errors import InvalidInput
from tokenmesh.shared.failed import from_failed
from tokenmesh.shared.ids import GatewayId, RequestId

Prompt = str | Sequence[int]
Numbers = npt.NDArray[np.float32]


@dataclass(slots=True)
class GeneratedText:
    """It holds what a model generated after one prompt."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_cached: int
    """Prompt tokens found in the prefix cache."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class LLM:
    """One model with its engine and its prefix cache. Not thread-safe; every call blocks.

    It takes the settings of a worker and draws its tokens: equal prompts, seeds and settings make
    equal streams. It has no tenants, media, adapters or limits of time.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        """`settings`: fields of `ModelSettings` and `WorkerSettings`, such as dtype, max_model_len,
        max_num_seqs. Raises ConfigError, CheckpointError, and ValueError for an unknown one."""
        own = {key: settings.pop(key) for key in ModelSettings.model_fields if key in settings}
        self._model = ModelSettings.model_validate({"model": model, **own})
        self._worker = WorkerSettings.model_validate(settings)
        self.loaded = build(self._model, self._worker, lambda done, total: None)
        proposer = make_proposer(self._model.speculative_config, self.loaded.runner)
        self._engine = Engine(self.loaded.runner, self._worker, proposer=proposer)
        self.text = LocalTokenizer(self._model)
        self._numbers = count()
        self._compiler: LocalCompiler | None = None

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[GeneratedText]:
        """Continue texts, or prompts of token ids, together; one `sampling` for all or one each.

        Raises InvalidInput before anything is computed, and the error of a stream that failed.
        """
        if self.loaded.pooling is not None:
            raise InvalidInput("this model pools; it does not generate text", param="model")
        given = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        pairs = zip(map(self._ids, prompts), given, strict=True)
        requests = [self._generation(ids, each) for ids, each in pairs]
        return [self._completion(each) for each in self._run(requests)]

    def chat(
        self,
        conversations: Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams],
        **variables: Any,
    ) -> list[GeneratedText]:
        """Answer conversations by the checkpoint's chat template, which gets `variables`."""
        prompts = [self.text.render(each, variables) for each in conversations]
        return self.generate(prompts, sampling)

    def embed(self, prompts: Sequence[Prompt], dimensions: int | None = None) -> list[Numbers]:
        """A vector [size] for each prompt."""
        params = PoolingParams(task="embed", dimensions=dimensions)
        return self._pool([(self._ids(each), b"") for each in prompts], params)

    def classify(self, prompts: Sequence[Prompt]) -> list[dict[str, float]]:
        """The shares of the labels for each prompt."""
        params, facts = PoolingParams(task="classify"), self._facts()
        names = facts.labels or tuple(map(str, range(facts.size)))
        pooled = self._pool([(self._ids(each), b"") for each in prompts], params)
        return [dict(zip(names, each.tolist(), strict=True)) for each in pooled]

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return how well the second text of a pair answers the first: by a model that reads both
        at once, or by the cosine of their embeddings.

        Raises InvalidInput for a model that reads pairs as messages of its own template.
        """
        facts = self._facts()
        if "score" in facts.tasks:
            prompts = [self.text.encode_pair(*pair) for pair in pairs]
            kept = [(ids, types if facts.num_types > 1 else b"") for ids, types in prompts]
            return [float(each[0]) for each in self._pool(kept, PoolingParams(task="score"))]
        vectors = self.embed([text for pair in pairs for text in pair])
        return [_cosine(*vectors[at : at + 2]) for at in range(0, len(vectors), 2)]

    def _ids(self, prompt: Prompt) -> list[int]:
        ids = self.text.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids or not 0 <= min(ids) <= max(ids) < self.loaded.vocab_size:
            raise InvalidInput("a prompt holds no token, or one that the model does not have")
        return ids

    def _generation(self, ids: list[int], sampling: SamplingParams) -> Request:
        loaded = self.loaded
        check_sampling(sampling, loaded.vocab_size)
        sizes = loaded.max_model_len, loaded.runner.num_blocks, self._worker.block_size
        check_length(len(ids), sampling.max_tokens, *sizes)
        request = self._request(ids, in_range(sampling, loaded.vocab_size))
        if sampling.structured is not None:
            request.prepared.grammar = self._grammar(sampling.structured)
        return request

    def _request(self, ids: list[int], sampling: SamplingParams, **pooling: Any) -> Request:
        number, loaded = next(self._numbers), self.loaded
        spec = RequestSpec(
            key=StreamKey(GatewayId(""), number, 0),
            request_id=RequestId(str(number)),
            num_prompt=len(ids),
            sampling=sampling,
            eos_ids=loaded.eos_token_ids,
            cache_salt=loaded.cache_salt(None, len(ids)),
            rope_boundary=loaded.rope_boundary,
            **pooling,
        )
        return Request(spec, ids)

    def _grammar(self, structured: Structured) -> Grammar:
        if self._compiler is None:
            loaded, file = self.loaded, locate_tokenizer(self._model)
            self._compiler = LocalCompiler(file, loaded.vocab_size, loaded.eos_token_ids)
        try:
            return self._compiler.compile(structured, self._worker.structured_outputs_backend)
        except CannotCompile as error:
            raise InvalidInput(f"{structured.field}: {error}", param=structured.field) from error

    def _pool(
        self, prompts: Sequence[tuple[list[int], bytes]], params: PoolingParams
    ) -> list[Numbers]:
        facts = self._facts()
        facts.check(params)
        given = {
            "pooling": facts.completed(params),
            "is_whole": not facts.is_causal,
            "reads_all": facts.reads_all_for(params),
        }
        loaded, nothing, requests = self.loaded, SamplingParams(seed=0, max_tokens=1), []
        for ids, types in prompts:
            blocks = loaded.runner.num_blocks if facts.is_causal else 1 << 40
            check_length(len(ids), 0, loaded.max_model_len, blocks, self._worker.block_size)
            facts.num_left_out(params, ids)  # raises InvalidInput where the instruction is broken
            ids = facts.read_of(params, ids)
            requests.append(self._request(ids, nothing, type_ids=types, **given))
        return [_numbers_of(each.request) for each in self._run(requests)]

    def _facts(self) -> PoolingFacts:
        if self.loaded.pooling is None:
            raise InvalidInput("this model generates text; it does not pool", param="model")
        return self.loaded.pooling

    def _run(self, requests: Sequence[Request]) -> list[FinishedRequest]:
        finished = run_to_end(self._engine, requests)
        for each in finished:
            if each.ending.error is not None:
                raise from_failed(each.ending.error)
        return finished

    def _completion(self, finished: FinishedRequest) -> GeneratedText:
        ids, num_cached = finished.token_ids, finished.request.place.num_cached or 0
        text, reason = self.text.decode(ids), finished.ending.reason
        return GeneratedText(ids, text, reason, num_cached, finished.logprobs)


def _numbers_of(request: Request) -> Numbers:
    pooled = request.output.pooled
    assert pooled is not None, "a request that pools ends with its numbers"
    return np.frombuffer(pooled.data, np.dtype("<f4")).reshape(pooled.shape)


def _cosine(one: Numbers, other: Numbers) -> float:
    return float(one @ other / math.sqrt(float(one @ one) * float(other @ other)))
