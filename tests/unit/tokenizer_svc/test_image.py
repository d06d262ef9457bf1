"""Image files become the pixels that transformers makes of them; hostile ones become errors."""

import io
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image, ImageOps
from transformers import CLIPImageProcessorPil
from transformers.image_transforms import convert_to_rgb

from tests.fakes.bombs import multi_picture, png_declaring, with_scans
from tests.fakes.images import deep_png, image_file, picture
from tests.fakes.llava import llava_without_weights
from tests.fakes.media_models import without_weights
from tests.fakes.tokenizers import write_json
from tokenmesh.services.tokenizer_svc.media.image_file import decode_image
from tokenmesh.services.tokenizer_svc.media.processor import ItemProcessor
from tokenmesh.shared.errors import CheckpointError, InvalidInput, PayloadTooLarge
from tokenmesh.shared.tensor_blob import decode_named

MAX_PIXELS = 1_000_000
LITTLE_S = 4.0
"""CPU time that is enough for a slow machine, and too little to decode 200,000 scans."""
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
@pytest.mark.parametrize(
    ("width", "height"),
    [
        (33, 40),
        (200, 7),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((40, 33), (31, 31), (1, 1))),
    ],
)
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


def palette(picture: Image.Image, **facts: Any) -> bytes:
    """A PNG of eight colors."""
    return image_file(picture.quantize(8), "PNG", **facts)


FILES: dict[str, Callable[[int], bytes]] = {
    "gray": lambda seed: image_file(picture(seed, mode="L")),
    "black and white": lambda seed: image_file(picture(seed, mode="L").convert("1")),
    "colors": lambda seed: image_file(picture(seed)),
    "gray with transparency": lambda seed: image_file(picture(seed, mode="LA")),
    "colors with transparency": lambda seed: image_file(picture(seed, mode="RGBA")),
    "a transparent gray": lambda seed: image_file(picture(seed, mode="L"), transparency=seed),
    "a transparent color": lambda seed: image_file(
        picture(seed), transparency=picture(seed).getpixel((0, 0))
    ),
    "palette": lambda seed: palette(picture(seed)),
    "palette with a transparent color": lambda seed: palette(picture(seed), transparency=3),
    "palette with transparencies": lambda seed: palette(
        picture(seed), transparency=bytes([0, 128, 255, seed])
    ),
    "deep gray with transparency": lambda seed: deep_png(deep(seed, 2)),
    "deep colors": lambda seed: deep_png(deep(seed, 3)),
    "deep colors with transparency": lambda seed: deep_png(deep(seed, 4)),
    "JPEG in gray": lambda seed: image_file(picture(seed, mode="L"), "JPEG"),
    "JPEG for print": lambda seed: image_file(picture(seed).convert("CMYK"), "JPEG"),
    "WebP with transparency": lambda seed: image_file(
        picture(seed, mode="RGBA"), "WEBP", lossless=True
    ),
    "lossy WebP with transparency": lambda seed: image_file(picture(seed, mode="RGBA"), "WEBP"),
    "GIF with a transparent color": lambda seed: image_file(
        picture(seed).quantize(8), "GIF", transparency=2
    ),
    "animated GIF that begins transparent": lambda seed: image_file(
        picture(seed).quantize(8),
        "GIF",
        save_all=True,
        append_images=[picture(seed + 1).quantize(8)],
        transparency=2,
        disposal=2,
    ),
    "animated WebP with transparency": lambda seed: image_file(
        picture(seed, mode="RGBA"),
        "WEBP",
        save_all=True,
        append_images=[picture(seed + 1, mode="RGBA")],
        lossless=True,
    ),
}


def deep(seed: int, channels: int) -> numpy.ndarray:
    return numpy.random.default_rng(seed).integers(0, 1 << 16, (9, 7, channels))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 200))]
)
def test_colors_become_those_of_transformers(name: str, seed: int) -> None:
    data = FILES[name](seed)
    with Image.open(io.BytesIO(data)) as image:
        expected = convert_to_rgb(ImageOps.exif_transpose(image), return_numpy=True)
    decoded = decode_image(data, MAX_PIXELS)
    assert decoded.mode == "RGB"
    numpy.testing.assert_array_equal(numpy.array(decoded), expected)


def test_what_is_transparent_is_white_and_text_on_it_can_be_read() -> None:
    text = Image.new("RGBA", (30, 20), (0, 0, 0, 0))
    text.paste((0, 0, 0, 255), (5, 5, 25, 10))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    for kind in ("PNG", "WEBP"):
        decoded = numpy.array(decode_image(image_file(text, kind, exif=exif, lossless=True), 10**6))
        assert decoded.shape == (30, 20, 3)
        assert (decoded[:5] == 255).all()
        assert (decoded[5:25, 10:15] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_gray_of_16_bits_is_not_clipped(seed: int) -> None:
    """Where transformers' loading in pillow makes nearly all of it white."""
    pixels = deep(seed, 1)
    decoded = numpy.array(decode_image(deep_png(pixels), MAX_PIXELS))
    numpy.testing.assert_array_equal(decoded, (pixels >> 8).repeat(3, axis=-1))
    transparent = int(pixels[2, 3, 0])
    decoded = numpy.array(decode_image(deep_png(pixels, (transparent,)), MAX_PIXELS))
    expected = numpy.where(pixels == transparent, 255, pixels >> 8).repeat(3, axis=-1)
    numpy.testing.assert_array_equal(decoded, expected)


def test_a_transparent_color_of_16_bits_is_found_in_the_8_bits_that_are_read() -> None:
    pixels = (deep(4, 3) >> 8) * 257
    color = tuple(map(int, pixels[1, 1]))
    decoded = numpy.array(decode_image(deep_png(pixels, color), MAX_PIXELS))
    assert (decoded[1, 1] == 255).all()
    numpy.testing.assert_array_equal(decoded[2:], pixels[2:] >> 8)


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
