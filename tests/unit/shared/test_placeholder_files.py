"""A pointer or a page in place of a model's file is called that by every reader of such files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmesh.cli.embedded.plan import check_file
from tokenmesh.engine.models import raw_config
from tokenmesh.services.tokenizer_svc import loading
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.gguf.reader import GgufFile
from tokenmesh.shared.tensor_file import TensorFile

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4cac19\nsize 135\n"
READERS: list[Callable[[Path], object]] = [
    TensorFile,
    GgufFile.read,
    loading.read_json,
    raw_config.read_json,
    lambda path: check_file("model", path),
]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (POINTER, "git lfs pull"),
        (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "web page"),
        (b"<HTML>", "web page"),
        (b"", "empty"),
    ],
)
@pytest.mark.parametrize("read", READERS)
def test_what_is_in_place_of_a_file_is_said(
    tmp_path: Path, read: Callable[[Path], object], content: bytes, words: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(TokenMeshError, match=words):
        read(path)
