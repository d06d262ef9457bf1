"""Image files become the pixels that transformers makes of them; hostile ones become errors."""

import io
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image, ImageOps
from transformers import CLIPImageProcessorPil

from tests.fakes.bombs import multi_picture, png_declaring, with_scans
from tests.fakes.images import image_file, picture
from tests.fakes.llava import llava_without_weights
from tests.fakes.media_models import without_weights
from tests.fakes.tokenizers import write_json
from tokenmesh.services.tokenizer_svc.media.decode_child import decode_image
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor
from tokenmesh.shared.errors import CheckpointError, InvalidInput, PayloadTooLarge
from tokenmesh.shared.tensor_blob import decode_named

MAX_PIXELS = 1_000_000
LITTLE_S = 4.0
"""Of CPU time: enough for a slow machine, too little to decode 200,000 scans."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"size": {"shortest_edge": 30}, "crop_size": {"height": 30, "width": 30}},
    "as in llava 1.5": {"size": {"shortest_edge": 336}, "crop_size": 336},
    "square": {"size": {"height": 20, "width": 28}, "do_center_crop": False},
    "crop larger than image": {"size": {"shortest_edge": 8}, "crop_size": 30},
    "no resize": {"do_resize": False, "crop_size": 16, "resample": 2},
    "no normalization": {"do_normalize": False, "size": 30, "crop_size": 30},
    "bilinear": {"resample": 2, "size": {"shortest_edge": 31}, "crop_size": 30},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("width", "height"), [(40, 33), (33, 40), (200, 7), (31, 31), (1, 1)])
def test_pixels_equal_those_of_transformers(
    options: str, width: int, height: int, tmp_path: Path
) -> None:
    llava_without_weights(tmp_path)
    values = {"image_processor_type": "CLIPImageProcessor", **OPTIONS[options]}
    write_json(tmp_path / "preprocessor_config.json", values)
    image = picture(1, width, height)
    item = ItemProcessor(tmp_path).image(decode_image(image_file(image), MAX_PIXELS), {})
    blob = decode_named(item.features)["pixel_values"]
    oracle = CLIPImageProcessorPil(**OPTIONS[options])
    theirs = oracle(images=[image], return_tensors="np")["pixel_values"][0]
    assert (blob.dtype, blob.shape) == ("float32", (1, *theirs.shape))
    ours = numpy.frombuffer(blob.data, dtype="<f4").reshape(theirs.shape)
    numpy.testing.assert_array_equal(ours, theirs.astype(numpy.float32))


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_every_mode_becomes_rgb(mode: str, kind: str) -> None:
    image = picture(2, mode=mode)
    options = {"lossless": True} if kind == "WEBP" else {}
    decoded = decode_image(image_file(image, kind, **options), MAX_PIXELS)
    assert decoded.mode == "RGB"
    if mode != "RGBA":
        numpy.testing.assert_array_equal(numpy.array(decoded), numpy.array(image.convert("RGB")))


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("orientation", range(10))
def test_the_orientation_of_a_photo_is_applied(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = image_file(picture(3, 20, 10), kind, exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        expected = numpy.array(ImageOps.exif_transpose(image))
    numpy.testing.assert_array_equal(numpy.array(decode_image(data, MAX_PIXELS)), expected)


def test_a_sound_photo_with_odd_facts_about_it_is_taken() -> None:
    # an orientation, and a width that is text
    entries = struct.pack("<HHI4sHHIHH", 0x0100, 2, 4, b"abc", 0x0112, 3, 1, 6, 0)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + entries + bytes(4)
    data = image_file(picture(3, 20, 10), "JPEG", exif=exif)
    assert decode_image(data, MAX_PIXELS).size == (10, 20)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_gives_its_first_frame(kind: str) -> None:
    frames = [picture(seed).convert("P").convert("RGB") for seed in (4, 5)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = image_file(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    expected = numpy.array(frames[0])
    numpy.testing.assert_array_equal(numpy.array(decode_image(data, MAX_PIXELS)), expected)


def test_many_frames_cost_as_much_as_one() -> None:
    frames = [Image.new("P", (60, 60), number % 256) for number in range(400)]
    data = image_file(frames[0], "GIF", save_all=True, append_images=frames[1:], optimize=False)
    started_s = time.process_time()
    assert decode_image(data, MAX_PIXELS).size == (60, 60)
    assert time.process_time() - started_s < LITTLE_S


def test_an_animation_has_the_bound_of_its_canvas() -> None:
    """A frame may be small, the canvas is what is decoded."""
    data = bytearray(image_file(picture(4).convert("P"), "GIF"))
    data[6:10] = struct.pack("<HH", 60_000, 60_000)
    with pytest.raises(PayloadTooLarge, match=r"too large|60000x60000"):
        decode_image(bytes(data), MAX_PIXELS)


def test_a_header_that_lies_about_the_size_is_damaged_or_bounded() -> None:
    small = png_declaring(10, 10)  # rows for far more pixels than the header declares
    with suppress(InvalidInput):
        assert decode_image(small, MAX_PIXELS).size == (10, 10)
    jpeg = bytearray(image_file(picture(4), "JPEG"))
    place = jpeg.index(b"\xff\xc0") + 5
    jpeg[place : place + 4] = struct.pack(">HH", 65_000, 65_000)
    with pytest.raises(PayloadTooLarge, match=r"too large|pixels"):
        decode_image(bytes(jpeg), MAX_PIXELS)
    jpeg[place : place + 4] = struct.pack(">HH", 900, 900)
    with suppress(InvalidInput):
        assert decode_image(bytes(jpeg), MAX_PIXELS).size == (900, 900)


def test_a_line_of_pixels_is_decoded_or_refused_by_the_processor(tmp_path: Path) -> None:
    line = decode_image(image_file(Image.new("RGB", (100_000, 1))), MAX_PIXELS)
    assert line.size == (100_000, 1)
    with pytest.raises(ValueError, match="aspect ratio"):
        ItemProcessor(without_weights(tmp_path, "qwen2_vl")).image(line, {})


def test_200000_scans_are_refused_before_one_is_decoded() -> None:
    data = with_scans(image_file(picture(9), "JPEG", progressive=True), 200_000)
    started_s = time.process_time()
    with pytest.raises(PayloadTooLarge, match="scans"):
        decode_image(data, MAX_PIXELS)
    assert time.process_time() - started_s < LITTLE_S


@pytest.mark.parametrize("size", [1001, 20_000, 60_000])
def test_a_bomb_is_refused_before_it_is_decoded(size: int) -> None:
    with pytest.raises(PayloadTooLarge, match=r"too large|at most 1000000"):
        decode_image(png_declaring(size, size), MAX_PIXELS)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PPM", "ICO"])
def test_formats_with_unbounded_decoders_are_refused(kind: str) -> None:
    with pytest.raises(InvalidInput, match=r"known format \(PNG, JPEG, WEBP, GIF\)"):
        decode_image(image_file(picture(8), kind), MAX_PIXELS)


def test_a_jpeg_with_too_many_scans_is_refused() -> None:
    data = image_file(picture(9), "JPEG", progressive=True)
    assert decode_image(data, MAX_PIXELS).mode == "RGB"
    with pytest.raises(PayloadTooLarge, match="scans"):
        decode_image(with_scans(data, 100), MAX_PIXELS)


def test_a_jpeg_of_several_pictures_has_the_same_bounds() -> None:
    data = image_file(picture(9), "JPEG", progressive=True)
    sound = multi_picture(data)
    with Image.open(io.BytesIO(sound)) as image:
        assert image.format == "MPO"
    assert decode_image(sound, MAX_PIXELS).size == picture(9).size
    with pytest.raises(PayloadTooLarge, match="scans"):
        decode_image(multi_picture(with_scans(data, 100)), MAX_PIXELS)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_truncated_image_is_damaged(kind: str) -> None:
    data = image_file(picture(6), kind)
    with pytest.raises(InvalidInput, match=r"damaged|no image"):
        decode_image(data[: len(data) // 2], MAX_PIXELS)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"RIFF\x00\x00\x00\x00WEBPVP8 ",
    ],
)
def test_files_that_are_not_images_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"not an image|damaged"):
        decode_image(data, MAX_PIXELS)


# pillow warns about damaged metadata in an image that is sound.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_flipped_byte_gives_an_image_or_an_error() -> None:
    messages: list[str] = []
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        data = image_file(picture(7, 12, 9), kind)
        for place in range(0, len(data), 7):
            broken = bytearray(data)
            broken[place] ^= 0xFF
            try:
                assert decode_image(bytes(broken), MAX_PIXELS).mode == "RGB"
            except InvalidInput as error:
                messages.append(error.message)
    assert messages
    assert "0x" not in "".join(messages)


def test_a_checkpoint_without_image_processor_says_so(tmp_path: Path) -> None:
    directory = llava_without_weights(tmp_path)
    (directory / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no preprocessor_config\.json"):
        ItemProcessor(directory)
    write_json(directory / "preprocessor_config.json", {"image_processor_type": "Nothing"})
    with pytest.raises(CheckpointError, match="processor cannot be loaded"):
        ItemProcessor(directory)
