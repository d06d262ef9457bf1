"""Speculating: what it leaves behind for others, besides the tokens of its streams."""

from random import Random

from tests.fakes.drafts import DiceProposer
from tests.fakes.kv_runner import VOCAB, KvRunner
from tokenmesh.engine.core.engine import Engine
from tokenmesh.engine.request.request import Request
from tokenmesh.engine.request.spec import RequestSpec, StreamKey
from tokenmesh.shared.config.worker import WorkerSettings
from tokenmesh.shared.ids import GatewayId, RequestId
from tokenmesh.shared.messages.sampling import SamplingParams

SETTINGS = WorkerSettings(
    max_num_seqs=4, max_num_batched_tokens=40, block_size=2, async_scheduling=False
)


def request(stream: int, prompt: list[int], max_tokens: int) -> Request:
    return Request(
        RequestSpec(
            key=StreamKey(GatewayId("g"), stream, 0),
            request_id=RequestId(f"r{stream}"),
            num_prompt=len(prompt),
            sampling=SamplingParams(seed=stream, max_tokens=max_tokens, ignore_eos=True),
        ),
        list(prompt),
    )


def engine_with(proposer: DiceProposer | None, num_blocks: int = 60) -> Engine:
    runner = KvRunner(SETTINGS, num_blocks, Random(0), 0.0, 0.0)
    return Engine(runner, SETTINGS, proposer=proposer)


def proposer_of(output: list[int], max_rows: int) -> DiceProposer:
    return DiceProposer(
        Random(1),
        lambda request: output if request.key.stream == 0 else [],
        VOCAB,
        max_drafts=9,
        max_rows=max_rows,
        share_wrong=0.5,
    )


def test_every_block_can_be_found_though_drafts_were_given_up_half_way() -> None:
    engine, plain = engine_with(None), request(0, [3, 4, 5], 30)
    engine.add(plain)
    while engine.has_work:
        engine.step()
    output = plain.token_ids[3:]
    for num_alone in range(1, 8):
        engine, first = engine_with(proposer_of(output, max_rows=1)), request(0, [3, 4, 5], 30)
        engine.add(first)
        for _ in range(num_alone):
            engine.step()
        # with two of them, both decode without drafts
        engine.add(request(1, [7] * 5, 30))
        while engine.has_work:
            engine.step()
        assert first.token_ids == plain.token_ids
        found = engine._cache.find(request(2, plain.token_ids, 1))[0]
        assert len(found) == (len(plain.token_ids) - 1) // 2
