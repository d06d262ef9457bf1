"""Directories that are made of other formats: outdated ones go, unless a process reads them."""

import subprocess
import sys
from pathlib import Path

from tokenmesh.shared.unpacked import Unpacking

READER = """
import sys
from pathlib import Path
from tests.unit.shared.test_unpacked import make
print(make(Path(sys.argv[1]), Path(sys.argv[2])), flush=True)
sys.stdin.read()
"""


def make(source: Path, folder: Path) -> Path:
    def fill(target: Path) -> None:
        (target / "copy").write_bytes(source.read_bytes())

    return Unpacking("any", layout=1).directory(source, [source], fill, str(folder))


def make_elsewhere(source: Path, folder: Path) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", READER, str(source), str(folder)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def directories(folder: Path) -> set[Path]:
    return {each for each in folder.iterdir() if each.is_dir()}


def test_a_changed_file_leaves_one_directory(tmp_path: Path) -> None:
    source, folder = tmp_path / "a.gguf", tmp_path / "made"
    source.write_text("first")
    with make_elsewhere(source, folder) as reader:
        assert reader.stdout is not None
        first = Path(reader.stdout.readline().strip())
        source.write_text("the second")
        second = make(source, folder)
        assert directories(folder) == {first, second}  # the reader may load it once more
        reader.communicate("")
    source.write_text("and the third")
    third = make(source, folder)
    assert (third / "copy").read_text() == "and the third"
    # This process reads the second, which is kept until its end.
    assert directories(folder) == {second, third}


def test_directories_of_files_that_are_gone_go(tmp_path: Path) -> None:
    gone, stays, new = (tmp_path / name for name in ("gone.gguf", "stays.gguf", "new.gguf"))
    folder = tmp_path / "made"
    for source in (gone, stays):
        source.write_text(source.name)
        with make_elsewhere(source, folder) as reader:
            reader.communicate("")
    gone.unlink()
    new.write_text("new")
    make(new, folder)
    names = {each.name.rsplit("-", 1)[0] for each in directories(folder)}
    assert names == {"stays", "new"}


def test_a_directory_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    source, folder = tmp_path / "a.gguf", tmp_path / "made"
    source.write_text("text")
    target = make(source, folder)
    for each in target.iterdir():
        each.unlink()
    target.rmdir()
    assert make(source, folder) == target
    assert (target / "copy").read_text() == "text"
