"""PoolDriver: the real engine and runner of a model that pools, prompts in, numbers out."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.fakes.poolers import ENCODERS, make_pooler, write_modules
from tokenmesh.engine.adapters.adapter import ReadAdapter
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.core.run_to_end import run_to_end
from tokenmesh.engine.exec.build_any import build
from tokenmesh.engine.exec.loaded_model import LoadedPooler
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import (
    Ending,
    RequestSpec,
    StreamKey,
)
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.hashing import Adapter
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.pooling import PoolingParams
from tokenmesh.shared.messages.sampling import SamplingParams
from tokenmesh.shared.tensor_blob import TensorBlob

EMBED = PoolingParams(task="embed")
Numbers = npt.NDArray[np.float32]


class PoolDriver:
    """An engine on a checkpoint; take `again` for other settings on the same weights."""

    def __init__(self, directory: Path, *, model: dict[str, Any] | None = None, **settings: Any):
        self.settings = WorkerSettings.model_validate({"device": "cpu", **settings})
        fields = {"model": str(directory), "dtype": "float32", **(model or {})}
        loaded = build(
            ModelSettings.model_validate(fields), self.settings, lambda done, total: None
        )
        assert isinstance(loaded, LoadedPooler)
        self.loaded = loaded
        self.engine = Engine(loaded.runner, self.settings)
        self._num_streams = 0

    def again(self, **settings: Any) -> "PoolDriver":
        """A new engine over the same runner, with some settings changed."""
        other = PoolDriver.__new__(PoolDriver)
        other.settings = self.settings.model_copy(update=settings)
        other.loaded = self.loaded
        other.engine = Engine(self.loaded.runner, other.settings)
        other._num_streams = self._num_streams
        return other

    def request(
        self,
        prompt: Sequence[int],
        params: PoolingParams = EMBED,
        type_ids: bytes = b"",
        media: Sequence[MediaItem] = (),
        embeddings: dict[str, TensorBlob] | None = None,
        adapter: ReadAdapter | None = None,
    ) -> Request:
        """A request that was not added yet."""
        self._num_streams += 1
        spec = RequestSpec(
            key=StreamKey(GatewayId("g"), self._num_streams, 0),
            request_id=RequestId("r"),
            num_prompt=len(prompt),
            sampling=SamplingParams(seed=0, max_tokens=1),
            pooling=params,
            type_ids=type_ids,
            media=list(media),
            whole_runs=self.loaded.media.whole_runs(media),
            is_whole=not self.loaded.pooling.is_causal,
            reads_all=self.loaded.pooling.reads_all_for(params),
            lora=None if adapter is None else Adapter("a", adapter.content_hash),
        )
        request = Request(spec, list(prompt))
        request.prepared.embeddings = embeddings or {}
        request.prepared.adapter = None if adapter is None else adapter.matrices
        return request

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: PoolingParams = EMBED,
        types: Sequence[bytes] = (),
    ) -> list[Numbers]:
        """The numbers of prompts that are computed together."""
        given = types or [b""] * len(prompts)
        requests = [
            self.request(prompt, params, each) for prompt, each in zip(prompts, given, strict=True)
        ]
        endings = self.end(requests)
        assert [each.reason for each in endings] == ["stop"] * len(requests), endings
        return [numbers_of(each) for each in requests]

    def run_adapted(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: Sequence[ReadAdapter | None],
        params: PoolingParams = EMBED,
    ) -> list[Numbers]:
        """The numbers of prompts that are computed together, each with its own adapter."""
        requests = [
            self.request(prompt, params, adapter=each)
            for prompt, each in zip(prompts, adapters, strict=True)
        ]
        endings = self.end(requests)
        assert [each.reason for each in endings] == ["stop"] * len(requests), endings
        return [numbers_of(each) for each in requests]

    def end(self, requests: Sequence[Request]) -> list[Ending]:
        """Run requests to their ends."""
        return [each.ending for each in run_to_end(self.engine, requests)]


def numbers_of(request: Request) -> Numbers:
    """Return the numbers of a request that has ended."""
    pooled = request.output.pooled
    assert pooled is not None
    return np.frombuffer(pooled.data, np.dtype("<f4")).reshape(pooled.shape)


def encoder_drivers(
    make_directory: Callable[[str], Path], **settings: Any
) -> Callable[[str], tuple[PoolDriver, Any]]:
    """For the name of an encoder an engine, and the same model of transformers; made once."""

    @cache
    def get(name: str) -> tuple[PoolDriver, Any]:
        directory = make_directory(name)
        model = make_pooler(ENCODERS[name], "Model")
        model.save_pretrained(directory)
        write_modules(directory)
        return PoolDriver(directory, max_num_batched_tokens=64, **settings), model

    return get
