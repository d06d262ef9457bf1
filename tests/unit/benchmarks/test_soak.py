"""The soak program: it hears lost, doubled and foreign tokens, and sees memory grow."""

import socket
from collections.abc import Callable

import psutil
import pytest

from benchmarks import soak
from benchmarks.serve.memory import MemoryWatch, Trail, mesh_processes
from benchmarks.serve.sim_oracle import SimOracle
from tests.fakes.scripted_http import DONE, Answer, piece, plain, serving, stream, usage
from tokenmesh.cli.bench.client import Target
from tokenmesh.engine.core.sim import SimVocabulary, prompt_key, sim_token
from tokenmesh.shared.messages.sampling import SamplingParams

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FIRST_ID = 300
Spoil = Callable[[list[str]], list[str]]


def sim_server(spoil: Spoil) -> Answer:
    """A server whose tokens are letters, and which hands on what `spoil` makes of a stream."""

    def complete(body: dict[str, object]) -> bytes:
        prompt, allowed = body["prompt"], body["allowed_token_ids"]
        assert isinstance(prompt, list)
        assert isinstance(allowed, list)
        sampling = SamplingParams(seed=int(str(body["seed"])), max_tokens=8)
        key, vocabulary = prompt_key(prompt), SimVocabulary(len(allowed))
        ids = [allowed[sim_token(key, sampling, at, vocabulary)] for at in range(8)]
        said = spoil([f" {LETTERS[each - FIRST_ID]}" for each in ids])
        return stream([*map(piece, said), usage(8), DONE])

    def answer(path: str, body: dict[str, object]) -> bytes:
        if path == "/tokenize":
            return plain(200, {"tokens": [FIRST_ID + index for index in range(26)]})
        if path == "/detokenize":
            ids = body["tokens"]
            assert isinstance(ids, list)
            text = "".join(f" {LETTERS[each - FIRST_ID]}" for each in ids)
            return plain(200, {"prompt": text})
        return complete(body)

    return answer


async def faults_of(spoil: Spoil) -> set[str]:
    async with serving(sim_server(spoil)) as url:
        server = Target(url, None)
        options = soak.parse(["--streams", "3", "--output-len", "8", "--model", "demo"])
        run = soak.Soak(options, server, await SimOracle.learn(server, "demo"))
        await run.run_each(2)
    assert run.num_streams == 6
    return set(run.faults)


async def test_right_streams_have_no_fault() -> None:
    assert await faults_of(lambda said: said) == set()


async def test_grouped_tokens_are_fine() -> None:
    assert await faults_of(lambda said: ["".join(said[:3]), *said[3:]]) == set()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda said: said[1:],
        lambda said: [*said, said[-1]],
        lambda said: [*said[:3], said[3], *said[3:]],
        lambda said: [*said[4:], *said[:4]],
        lambda said: [" z" if said[0] != " z" else " y", *said[1:]],
    ],
    ids=["lost", "doubled at the end", "doubled", "out of order", "foreign"],
)
async def test_wrong_tokens_are_heard(spoil: Spoil) -> None:
    assert await faults_of(spoil) == {"wrong_tokens"}


async def test_a_tokenizer_whose_texts_do_not_add_up_is_refused() -> None:
    def answer(path: str, _body: object) -> bytes:
        if path == "/tokenize":
            return plain(200, {"tokens": [1, 2, 3]})
        return plain(200, {"prompt": "same"})

    async with serving(answer) as url:
        with pytest.raises(ValueError, match="depend on each other"):
            await SimOracle.learn(Target(url, None), "demo")


def test_slope_and_growth_of_a_leak() -> None:
    times = [float(second) for second in range(100)]
    leak = Trail(1, "worker", times, [100 + 0.5 * at for at in times], [at / 4 for at in times])
    assert leak.slope_kib_s() == pytest.approx(512)
    assert leak.growth_mib() == pytest.approx(37.5)
    assert leak.cpu_share() == pytest.approx(0.25)


def test_a_flat_process_has_no_slope() -> None:
    times = [float(second) for second in range(100)]
    flat = Trail(1, "worker", times, [100 + at % 5 for at in times], times)
    assert abs(flat.slope_kib_s()) < 10
    assert flat.growth_mib() == 0


async def test_processes_are_sampled_for_the_given_time() -> None:
    watch = MemoryWatch([psutil.Process()], interval_s=0.01)
    await watch.run(0.0, 0.05)
    (trail,) = watch.trails
    assert len(trail.times_s) >= 2
    assert trail.rss_mib[0] > 1


def test_the_mesh_is_found_by_its_port() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert psutil.Process() in mesh_processes(port)
    with pytest.raises(ValueError, match=str(port)):
        mesh_processes(port)
