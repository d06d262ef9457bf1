"""The reader of safetensors files, against the library that writes them and against damage."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tokenmesh.shared import tensor_file
from tokenmesh.shared.errors import CheckpointError
from tokenmesh.shared.tensor_file import INDEX_FILE, SINGLE_FILE, TensorFile, TensorShards

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TYPES = st.sampled_from(["float32", "float16", "float64", "int8", "int64", "bool", "uint8"])
FILES = st.dictionaries(st.text(min_size=1, max_size=5), st.tuples(SHAPES, TYPES), max_size=5)
ON_DISK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def some_file(folder: Path) -> Path:
    path = folder / "model.safetensors"
    save_file(
        {
            "a": np.arange(6, dtype=np.float32).reshape(2, 3),
            "b": np.arange(4, dtype=np.int8),
            "c": np.zeros((0, 7), dtype=np.float16),
        },
        path,
        metadata={"format": "pt"},
    )
    return path


def read(file: TensorFile, name: str) -> bytes:
    target = bytearray(file[name].num_bytes)
    file.read_into(name, memoryview(target))
    return bytes(target)


def with_header(folder: Path, header: object, data: bytes) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "made.safetensors"
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


@ON_DISK
@given(FILES)
def test_what_the_library_writes_is_read_bit_for_bit(
    tmp_path: Path, wanted: dict[str, tuple[tuple[int, ...], str]]
) -> None:
    generator = np.random.default_rng(0)
    arrays = {
        name: generator.integers(0, 2, shape).astype(kind) for name, (shape, kind) in wanted.items()
    }
    save_file(arrays, tmp_path / "model.safetensors")
    file = TensorFile(tmp_path / "model.safetensors")
    assert {name: file[name].shape for name in file} == {n: a.shape for n, a in arrays.items()}
    assert {name: read(file, name) for name in file} == {n: a.tobytes() for n, a in arrays.items()}


@pytest.mark.parametrize("read_bytes", [1, 3, 1 << 30])
def test_a_part_of_a_tensor_is_read_in_any_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(tensor_file, "READ_BYTES", read_bytes)
    target = bytearray(8)
    TensorFile(some_file(tmp_path)).read_into("a", memoryview(target), start=12)
    assert np.frombuffer(target, np.float32).tolist() == [3.0, 4.0]


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = some_file(tmp_path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=str(path)):
            TensorFile(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match=f"holds {len(data) + 1} bytes"):
        TensorFile(path)


@ON_DISK
@given(st.data())
def test_a_damaged_header_is_refused_or_still_lies_within_the_file(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = some_file(tmp_path)
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", content)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        file = TensorFile(path)
    except CheckpointError:
        return
    assert all(file[name].offset + file[name].num_bytes <= len(content) for name in file)
    try:
        with safe_open(path, framework="numpy") as library:
            known = {name: tuple(library.get_slice(name).get_shape()) for name in library.keys()}  # noqa: SIM118
    except SafetensorError:
        return
    assert {name: file[name].shape for name in file} == known


@pytest.mark.parametrize(
    ("header", "data", "complaint"),
    [
        ([], b"", "Expected `object`"),
        (b"{", b"", "truncated"),
        (b"\xff\xff", b"", "malformed"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"", "data_offsets"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234", ">= 0"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234", "shape"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678", "from 0"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"1234", "4 to 0"),
        (
            {
                "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            },
            b"1234",
            "from 4",
        ),
        ({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 3]}}, b"12", "describes"),
    ],
)
def test_a_header_that_lies_is_refused_in_words(
    tmp_path: Path, header: object, data: bytes, complaint: str
) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        TensorFile(with_header(tmp_path, header, data))


def test_a_type_that_is_not_known_is_listed(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    assert TensorFile(with_header(tmp_path, header, b"12"))["a"].num_bytes == 2


def test_a_file_that_shrinks_after_it_was_opened_is_named(tmp_path: Path) -> None:
    path = some_file(tmp_path)
    file = TensorFile(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="tensor a cannot be read: it has become shorter"):
        read(file, "a")
    path.unlink()
    with pytest.raises(CheckpointError, match="tensor a cannot be read"):
        read(file, "a")


def test_files_without_a_wanted_tensor_need_not_be_there(tmp_path: Path) -> None:
    some_file(tmp_path).rename(tmp_path / "one.safetensors")
    weight_map = {"a": "one.safetensors", "b": "../x/one.safetensors", "z": "two.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    shards = TensorShards(tmp_path, lambda name: name in "ab")
    assert sorted(shards) == ["a", "b"]
    assert read(shards.file_of("b"), "b") == bytes(range(4))
    with pytest.raises(CheckpointError, match=r"two\.safetensors"):
        TensorShards(tmp_path)


def test_of_two_files_with_the_same_tensor_the_index_chooses(tmp_path: Path) -> None:
    first = some_file(tmp_path).rename(tmp_path / "one.safetensors")
    data = first.read_bytes()
    (tmp_path / "two.safetensors").write_bytes(data[:-1] + b"\xff")
    files = ("one.safetensors", "two.safetensors")
    for a, b in (files, files[::-1]):
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": a, "b": b}}))
        shards = TensorShards(tmp_path)
        assert [shards.file_of(name).path.name for name in "ab"] == [a, b]


def test_an_index_of_other_files_next_to_a_single_file_is_refused(tmp_path: Path) -> None:
    some_file(tmp_path).rename(tmp_path / "one.safetensors")
    some_file(tmp_path).rename(tmp_path / SINGLE_FILE)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"holds model\.safetensors and .*remove one"):
        TensorShards(tmp_path)
    weight_map = {"a": SINGLE_FILE, "b": "one.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert "a" in TensorShards(tmp_path)


def shards(folder: Path, *numbers: int, stem: str = "model", count: int = 2) -> Path:
    for number in numbers:
        arrays = {f"{stem}.{number}": np.arange(number, dtype=np.float32)}
        save_file(arrays, folder / f"{stem}-{number:05}-of-{count:05}.safetensors")
    return folder


def test_shards_need_no_index(tmp_path: Path) -> None:
    found = TensorShards(shards(tmp_path, 1, 2))
    assert set(found) == {"model.1", "model.2"}
    assert read(found.file_of("model.2"), "model.2") == np.arange(2, dtype=np.float32).tobytes()
    assert set(TensorShards(tmp_path, lambda name: name == "model.2")) == {"model.2"}


def test_what_a_directory_without_weights_lacks_is_named(tmp_path: Path) -> None:
    def problem() -> str:
        with pytest.raises(CheckpointError) as raised:
            TensorShards(tmp_path)
        return raised.value.message

    assert "holds no weights" in problem()
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pickled weights only (pytorch_model.bin)" in problem()
    save_file({"a": np.zeros(1)}, tmp_path / "weights.safetensors")
    assert "only weights.safetensors" in problem()
    shards(tmp_path, 2, count=3)
    assert "2 of 3 shards are missing: model-00001-of-00003.safetensors, model-00003" in problem()
    shards(tmp_path, 1, 2, stem="other")
    assert "shards of 2 checkpoints" in problem()


def test_a_tensor_of_two_shards_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({"a": np.zeros(1)}, tmp_path / f"model-{number:05}-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="tensor a is in model-00001-of-00002"):
        TensorShards(tmp_path)
