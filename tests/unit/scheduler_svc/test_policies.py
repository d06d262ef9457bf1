"""The policies for comparisons."""

from collections import Counter

from tokenmesh.services.scheduler_svc.placement import LoadPlacement, Placer, Worker
from tokenmesh.services.scheduler_svc.policies import RoundRobin, make_placer
from tokenmesh.shared.config.placement import Policy, SchedulerSettings
from tokenmesh.shared.ids import ModelName, RequestId, WorkerId
from tokenmesh.shared.messages.beat import WorkerLoad
from tokenmesh.shared.messages.place import Place


def worker(number: int, *, running: int = 0, draining: bool = False) -> Worker:
    load = WorkerLoad(running=running, max_num_seqs=100)
    return Worker(WorkerId(f"worker-{number}"), 1, load, draining, 0.0)


WORKERS = [worker(number) for number in range(4)]


def place(prefix: int = 0, number: int = 0) -> Place:
    """Seventeen route blocks: sixteen of the prefix, one of its own."""
    hashes = b"".join((prefix * 100 + block).to_bytes(8, "little") for block in range(16))
    return Place(
        request_id=RequestId(f"r-{number}"),
        model=ModelName("m"),
        num_tokens=1000,
        max_tokens=10,
        route_hashes=hashes + number.to_bytes(8, "little"),
    )


def placer(policy: Policy) -> Placer:
    def indexed() -> Placer:
        raise AssertionError("this policy does not use the index")

    return make_placer(SchedulerSettings(policy=policy), indexed)


async def chosen(made: Placer, request: Place, workers: list[Worker]) -> str | None:
    decision = await made.place(request, workers, 0.0)
    return None if decision.worker is None else decision.worker.worker_id


async def test_round_robin_takes_each_in_turn() -> None:
    made = placer("round_robin")
    names = [await chosen(made, place(), list(reversed(WORKERS))) for _ in range(8)]
    assert Counter(names) == Counter({each.worker_id: 2 for each in WORKERS})
    assert len(set(names[:4])) == 4


async def test_prompts_that_begin_alike_go_to_one_worker() -> None:
    made = placer("prefix_hash")
    homes = set()
    for prefix in range(40):
        names = {await chosen(made, place(prefix, number), WORKERS) for number in range(5)}
        assert len(names) == 1
        homes |= names
    assert len(homes) == 4


async def test_a_worker_that_leaves_moves_only_its_own_prompts() -> None:
    made = placer("prefix_hash")
    for prefix in range(20):
        before = await chosen(made, place(prefix), WORKERS)
        after = await chosen(made, place(prefix), WORKERS[1:])
        assert before in (after, WORKERS[0].worker_id)


async def test_draining_and_full_workers_are_skipped() -> None:
    for policy in ("round_robin", "prefix_hash"):
        made = placer(policy)
        workers = [worker(1, draining=True), worker(2, running=200), worker(3)]
        assert {await chosen(made, place(n), workers) for n in range(8)} == {"worker-3"}
        assert await chosen(made, place(), workers[:2]) is None


def test_the_default_is_the_index_and_least_tokens_is_load_alone() -> None:
    marker = LoadPlacement(SchedulerSettings())
    assert make_placer(SchedulerSettings(), lambda: marker) is marker
    assert type(placer("least_tokens")) is LoadPlacement
    assert isinstance(placer("round_robin"), RoundRobin)
