"""Images are decoded in processes with a time and a memory: no file holds anything for longer."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from PIL import Image

from tests.fakes.images import image_file, picture
from tests.fakes.llava import llava_without_weights
from tokenmesh.services.tokenizer_svc.media.decode_child import prepare_image
from tokenmesh.services.tokenizer_svc.media.item_decoder import ItemDecoder
from tokenmesh.services.tokenizer_svc.media.jobs import job_of
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor
from tokenmesh.shared.config.model import MediaSettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = MediaSettings(decode_processes=1, decode_timeout_s=1.0, max_pixels=40_000_000)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava_without_weights(tmp_path_factory.mktemp("llava"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def decoder(checkpoint: Path) -> AsyncIterator[ItemDecoder]:
    decoder = ItemDecoder("image", LIMITS, checkpoint)
    yield decoder
    await decoder.stop()


def endless(num_scans: int = 60) -> bytes:
    """A progressive JPEG within every count that takes many seconds: each scan goes over it all."""
    file = image_file(Image.new("RGB", (6000, 6000)), "JPEG", progressive=True)
    scans = file.split(b"\xff\xda")
    # Scans of one component are the cheapest in bytes, and as dear in time as others.
    return b"\xff\xda".join([*scans[:-1], *[scans[-1][:-2]] * (num_scans - len(scans))]) + (
        b"\xff\xda" + scans[-1]
    )


async def test_features_are_those_of_the_processor(decoder: ItemDecoder, checkpoint: Path) -> None:
    processor = ItemProcessor(checkpoint)
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        data = image_file(picture(1, 40, 33), kind)
        answer = await decoder.decode(data, b"", "a")
        assert answer.encode() == prepare_image(job_of(data), processor, LIMITS.max_pixels)
    for data, error in (
        (b"hello", InvalidInput),
        (image_file(Image.new("L", (9000, 9000)), "PNG"), PayloadTooLarge),
    ):
        with pytest.raises(error):
            await decoder.decode(data, b"", "a")


async def test_a_file_that_takes_too_long_is_given_up_and_the_next_one_is_decoded(
    decoder: ItemDecoder,
) -> None:
    small = image_file(picture(1), "PNG")
    await decoder.decode(small, b"", "a")
    started_s = time.perf_counter()
    with pytest.raises(PayloadTooLarge, match="takes longer than 1 s"):
        await decoder.decode(endless(), b"", "b")
    assert time.perf_counter() - started_s < 8
    assert (await decoder.decode(small, b"", "a")).features


async def test_a_file_that_takes_too_much_memory_is_given_up(checkpoint: Path) -> None:
    limits = LIMITS.model_copy(update={"decode_memory_bytes": 700 * 2**20, "decode_timeout_s": 9.0})
    decoder = ItemDecoder("image", limits, checkpoint)
    # Resized to 30 pixels of height, it would be 30 million wide.
    with pytest.raises(PayloadTooLarge, match="more"):
        await decoder.decode(image_file(Image.new("L", (1_000_000, 1)), "PNG"), b"", "b")
    await decoder.stop()


async def test_options_of_a_request_are_checked_and_change_the_features(
    decoder: ItemDecoder,
) -> None:
    data = image_file(picture(1, 40, 33), "PNG")
    plain = await decoder.decode(data, b"", "a")
    assert (await decoder.decode(data, b'{"size":{"shortest_edge":40}}', "a")) != plain
    for options, message in (
        (b'{"image_mean":[0,0,0]}', "no option 'image_mean'; it has"),
        (b"[1]", "is not an object"),
        (b"{", "is not JSON"),
        (b'{"size":"large"}', "cannot be preprocessed"),
    ):
        with pytest.raises(InvalidInput, match=message):
            await decoder.decode(data, options, "a")
