"""Images that arrive together share a forward pass; one that fails fails alone."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from tokenmesh.services.mm_encoder_svc.batcher import Batcher, Features
from tokenmesh.shared.config.model import EncoderSettings
from tokenmesh.shared.errors import Overloaded, ProtocolError
from tokenmesh.shared.tensor_blob import TensorBlob

LIMITS = EncoderSettings(max_batch=3, max_batch_embeddings=100, batch_window_s=0.01, queue=8)


def pixels(value: int, num_embeddings: int = 1) -> Features:
    blob = TensorBlob("uint8", (1,), bytes([value]))
    return Features("image", {"pixel_values": blob}, num_embeddings)


class FakeTower:
    """Answers with its input; holds each batch until it may go on."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may_run = threading.Event()
        self.may_run.set()
        self.has_begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def encode(self, batch: list[Features]) -> list[TensorBlob]:
        blobs = [features.tensors["pixel_values"] for features in batch]
        self.batches.append([blob.data[0] for blob in blobs])
        self._loop.call_soon_threadsafe(self.has_begun.set)
        assert self.may_run.wait(5)
        if any(blob.data[0] == 255 for blob in blobs):
            raise ProtocolError("a bad image")
        return blobs


@pytest.fixture
async def tower() -> FakeTower:
    return FakeTower()


@pytest.fixture
async def batcher(tower: FakeTower) -> AsyncIterator[Batcher]:
    batcher = Batcher(tower.encode, LIMITS)
    running = asyncio.create_task(batcher.run())
    yield batcher
    tower.may_run.set()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    batcher.stop()


async def test_images_of_one_moment_share_batches_up_to_the_bound(
    batcher: Batcher, tower: FakeTower
) -> None:
    results = await asyncio.gather(*(batcher.submit(pixels(value)) for value in range(5)))
    assert [result.data[0] for result in results] == [0, 1, 2, 3, 4]
    assert tower.batches == [[0, 1, 2], [3, 4]]


async def test_an_image_alone_does_not_wait_for_a_full_batch(
    batcher: Batcher, tower: FakeTower
) -> None:
    async with asyncio.timeout(15):
        await batcher.submit(pixels(7))
    async with asyncio.timeout(15):
        await batcher.submit(pixels(8))
    assert tower.batches == [[7], [8]]


async def test_a_batch_has_a_bound_of_embeddings_that_one_image_may_exceed(
    batcher: Batcher, tower: FakeTower
) -> None:
    sizes = (60, 60, 40, 300, 1)
    waiting = (batcher.submit(pixels(value, size)) for value, size in enumerate(sizes))
    await asyncio.gather(*waiting)
    assert tower.batches == [[0], [1, 2], [3], [4]]


async def test_an_image_that_cannot_be_encoded_fails_alone(
    batcher: Batcher, tower: FakeTower
) -> None:
    waiting = (batcher.submit(pixels(value)) for value in (1, 255, 2))
    first, bad, last = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(bad, ProtocolError)
    assert isinstance(first, TensorBlob)
    assert isinstance(last, TensorBlob)
    assert tower.batches == [[1, 255, 2], [1], [255], [2]]


async def test_a_failing_batch_fails_its_own_images_only(batcher: Batcher) -> None:
    with pytest.raises(ProtocolError, match="a bad image"):
        await batcher.submit(pixels(255))
    assert (await batcher.submit(pixels(1))).data[0] == 1


async def test_an_image_of_a_cancelled_request_is_not_encoded(
    batcher: Batcher, tower: FakeTower
) -> None:
    tower.may_run.clear()
    first = asyncio.create_task(batcher.submit(pixels(1)))
    await tower.has_begun.wait()
    left = asyncio.create_task(batcher.submit(pixels(2)))
    stays = asyncio.create_task(batcher.submit(pixels(3)))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    tower.may_run.set()
    await asyncio.gather(first, stays)
    assert tower.batches == [[1], [3]]


async def test_a_full_queue_refuses(batcher: Batcher, tower: FakeTower) -> None:
    tower.may_run.clear()
    tasks = [asyncio.create_task(batcher.submit(pixels(0)))]
    await tower.has_begun.wait()
    tasks += [asyncio.create_task(batcher.submit(pixels(value))) for value in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await batcher.submit(pixels(9))
    tower.may_run.set()
    await asyncio.gather(*tasks)
