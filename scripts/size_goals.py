"""Goals for the size of the code as a whole, and where it stands; `budget.py` prints the table.

A goal is not a limit: nothing fails where one is missed, but the table shows the reason.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
GATEWAY: Final = Path("tokenmesh/services/gateway")
GENERAL_KIND: Final = Path("tokenmesh/engine/models/tree")
"""Its own files; what pools, media and stored codes need of it is in folders below."""
ADDED_SINCE: Final = (
    "apis/audio",
    "apis/batches",
    "apis/ollama",
    "apis/operator",
    "apis/pooling",
    "apis/realtime/item_transcript",
    "apis/realtime/speech_input",
    "apis/sagemaker",
    "apis/scale_out",
    "core/operations/adapter",
    "core/operations/console",
    "document",
)
"""Parts of the gateway that are younger than the goals."""
PATH_TEST: Final = Path("tests/integration/test_path_length.py")


@dataclass(frozen=True, slots=True)
class Goal:
    """One row: at most `most` of something."""

    what: str
    most: int
    number: int
    reason: str
    """Why it is missed; shown only then."""

    @property
    def row(self) -> str:
        """The row as text, with the reason where the goal is missed."""
        missed = f"   {self.reason}" if self.number > self.most else ""
        return f"  {self.what:<32}{self.most:>8,}{self.number:>10,}{missed}"


def goals(lines: Mapping[Path, int], twice: int, empty: int) -> Iterator[Goal]:
    """The rows. `lines` of each file of the package; `twice`: public class names that are used
    again; `empty`: docstrings that say nothing."""
    gateway = {path.relative_to(GATEWAY): lines[path] for path in lines if GATEWAY in path.parents}
    younger = [path for path in gateway if path.as_posix().startswith(ADDED_SINCE)]
    num_younger = sum(gateway[path] for path in younger)
    since = "the goal is older than checkpoints of any architecture, quantization, pooling, media"
    yield Goal("package, lines", 50_000, sum(lines.values()), since)
    reason = (
        f"{num_younger:,} are younger than the goal (pooling, audio, batches, scale-out, Ollama, "
        "console); the rest are checks and texts of errors for the fields of five APIs"
    )
    yield Goal("gateway, lines", 17_500, sum(gateway.values()), reason)
    roots = [path for path in gateway if len(path.parts) == 1]
    yield Goal("gateway, files in its root", 6, len(roots), "")
    rooms, arrows = _rooms(gateway)
    yield Goal("gateway, folders and root files", 26, rooms, "audio, batches, Ollama, pooling")
    yield Goal("gateway, imports between them", 116, arrows, "each younger API adds about six")
    reason = "a file has one public concept: 30 of them would hold two each"
    yield Goal("one plain chat, gateway files", 30, _path_files(), reason)
    reason = "1,600 of them code: much of it recognises parts by numbers or says what is refused"
    general = sum(lines[path] for path in lines if path.parent == GENERAL_KIND)
    yield Goal("general kind, lines", 1_500, general, reason)
    yield Goal("public class names used twice", 0, twice, "")
    yield Goal("docstrings that say nothing", 0, empty, "")


def table(rows: Sequence[Goal]) -> str:
    """All rows under a header."""
    return "\n".join((f"{'':<34}{'goal':>8}{'is':>10}", *(each.row for each in rows)))


def _rooms(files: Mapping[Path, int]) -> tuple[int, int]:
    """Folders and root files of the gateway, and pairs of which one imports the other."""
    prefix = ".".join(GATEWAY.parts)
    names = {path: _room(path) for path in files}
    arrows = set()
    for path, room in names.items():
        tree = ast.parse((ROOT / GATEWAY / path).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{prefix}."):
                inside = (node.module or "").removeprefix(f"{prefix}.").replace(".", "/")
                is_folder = (ROOT / GATEWAY / inside).is_dir()
                target = inside if is_folder else _room(Path(f"{inside}.py"))
                arrows.add((room, target))
    return len(set(names.values())), sum(one != other for one, other in arrows)


def _room(path: Path) -> str:
    return path.stem if len(path.parts) == 1 else path.parent.as_posix()


def _path_files() -> int:
    """The bound that a test, which traces a chat, holds the number of files to."""
    found = re.search(r"^MAX_FILES = (\d+)$", (ROOT / PATH_TEST).read_text(), re.MULTILINE)
    assert found is not None, f"{PATH_TEST} has no MAX_FILES"
    return int(found[1])
