"""Plans, frames and places as ranks exchange them."""

import socket
from random import Random
from typing import Any

import msgspec
import pytest

from tests.fakes.engine_driver import greedy
from tokenmesh.engine.api.media import MediaItem
from tokenmesh.engine.api.sampling import SamplingParams
from tokenmesh.engine.plan import NewRow, SavedState, ScheduledRow, StepPlan
from tokenmesh.engine.ranks.frames import FrameKind, RankFrames, pack_frame
from tokenmesh.engine.ranks.wire import decode_plan, encode_plan
from tokenmesh.kernels.lora import LoraWeights
from tokenmesh.shared.config.environment import RankPlace, rank_environment, rank_place
from tokenmesh.shared.errors import ConfigError
from tokenmesh.shared.tensor_blob import TensorBlob


def a_plan() -> StepPlan:
    """Every field has a value that is not its default."""
    blob = TensorBlob("float32", (1, 2), memoryview(b"12345678"))
    new = NewRow(
        3,
        [5, 6, 7],
        2,
        SamplingParams(seed=9, temperature=0.5, logit_bias={4: 1.5}, max_tokens=8),
        [MediaItem(kind="image", content_hash="h", offset=0, length=1)],
        True,
        {"h": blob},
        state=4,
        type_ids=b"ab",
    )
    return StepPlan(
        step=8,
        removed_rows=[1],
        new_rows=[new],
        grown=[(2, 9)],
        grown_windowed=[(2, [4])],
        decodes=[2],
        scheduled=[
            ScheduledRow(3, 0, 3, [7, 8], True, [[1]], drafts=[11], pools=True, fills=[(7, 1)])
        ],
        saves=[SavedState(0, 3, [b"k"])],
        host_saves=[(6, 1)],
    )


def plain(value: Any) -> Any:
    """Numbers, texts and lists, for comparison."""
    return msgspec.to_builtins(value)


def test_a_plan_arrives_as_it_was() -> None:
    plan = a_plan()
    found = decode_plan(encode_plan(plan))
    assert plain(found) == plain(plan)
    assert isinstance(found, StepPlan)
    blob = found.new_rows[0].embeddings["h"]
    assert isinstance(blob, TensorBlob)
    assert bytes(blob.data) == b"12345678"


def test_a_grammar_stays_with_the_rank_that_draws() -> None:
    class Grammar:
        """Nothing that could be encoded."""

    new = NewRow(0, [1], 1, greedy(2), [], False, grammar=Grammar())  # type: ignore[arg-type]
    plan = StepPlan(step=1, new_rows=[new])
    assert decode_plan(encode_plan(plan)).new_rows[0].grammar is None
    assert plan.new_rows[0].grammar is not None


def test_matrices_travel_as_the_number_that_all_ranks_know() -> None:
    weights = LoraWeights({}, 0)
    rows = [NewRow(n, [1], 1, greedy(2), [], False, adapter=weights) for n in range(2)]
    plan = StepPlan(step=1, new_rows=rows)
    found = decode_plan(encode_plan(plan, {weights: 7}))
    numbers: list[Any] = [each.adapter for each in found.new_rows]
    assert numbers == [7, 7]
    assert rows[0].adapter is weights


def test_a_plan_of_another_version_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_plan(msgspec.msgpack.encode({"step": 1, "removed_rows": "all"}))


def test_frames_arrive_however_their_bytes_do() -> None:
    near, far = socket.socketpair()
    frames = [(FrameKind.PLAN, b"x" * 3000), (FrameKind.BEAT, b""), (FrameKind.DRAWN, b"abc")]
    data = b"".join(pack_frame(kind, payload) for kind, payload in frames)
    reader, random, found = RankFrames(far), Random(1), []
    with near, far:
        while data:
            count = random.randint(1, 700)
            near.sendall(data[:count])
            data = data[count:]
            found += reader.read()
        assert found == frames
        near.close()
        with pytest.raises(EOFError):
            reader.read()


def test_a_stranger_cannot_send_a_large_frame() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(pack_frame(FrameKind.HELLO, b"x" * 100))
        with pytest.raises(ValueError, match="a frame of 100 bytes"):
            RankFrames(far, most=99).read()


def test_a_place_is_read_from_torchruns_variables() -> None:
    place = RankPlace(1, 4, 1, 2, "10.0.0.1", 2900)
    assert rank_place(rank_environment(place, {})) == place
    assert rank_place({}) is None
    with pytest.raises(ConfigError, match="RANK is set, and MASTER_PORT should be as well"):
        rank_place({**rank_environment(place, {}), "MASTER_PORT": ""})
    with pytest.raises(ConfigError, match="WORLD_SIZE should be numbers"):
        rank_place({**rank_environment(place, {}), "WORLD_SIZE": "x"})
