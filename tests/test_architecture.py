"""The rules of the tree that import-linter cannot express."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tokenmesh"

# library -> the only places that may import it (prefixes of paths inside the package)
OWNERS = {
    "nats": ("shared/bus/nats",),
    "redis": ("shared/redis.py", "cli/embedded/"),
    "hiredis": ("shared/redis_link.py",),
    "opentelemetry.sdk": ("shared/telemetry/",),
    "transformers": (
        "services/tokenizer_svc/",
        "engine/models/tree/",
        "engine/local_tokenizer.py",
        "services/mm_encoder_svc/tower",
    ),
    "tokenizers": (
        "services/tokenizer_svc/",
        "engine/models/",
        "shared/gguf/tokenizer.py",
        "shared/text/vocabulary.py",
    ),
    "jinja2": ("services/tokenizer_svc/template.py", "services/tokenizer_svc/render_child.py"),
    "PIL": ("services/tokenizer_svc/media/", "services/mm_encoder_svc/"),
    "av": ("services/tokenizer_svc/media/",),
    "soundfile": ("services/tokenizer_svc/media/",),
    "soxr": ("services/tokenizer_svc/media/",),
    "fastapi": ("services/gateway/",),
    "starlette": ("services/gateway/",),
    "uvicorn": ("services/gateway/",),
    "pydantic": ("shared/config/", "services/gateway/"),
    "prometheus_client": ("shared/metrics", "services/gateway/", "shared/telemetry/"),
    "torch": ("engine/", "services/worker_svc/", "services/mm_encoder_svc/", "kernels/"),
    "torch.distributed": ("engine/ranks/",),
    "triton": ("kernels/",),
    "typer": ("cli/",),
    "rich": ("cli/",),
    "uuid": (),
    "random": ("cli/bench/",),
    "secrets": ("shared/ids.py", "cli/embedded/", "engine/ranks/rendezvous.py"),
    "time": ("shared/clock.py",),
    "pickle": (),
}
PRIVATE_IMPORT = re.compile(
    r"^ *(?:from|import) tokenmesh[\w.]*(?:\._| import (?:\([^)]*|[^(\n]*)\b_)", re.MULTILINE
)
TORCH_FREE = tuple(
    PACKAGE / "engine" / each for each in ("core", "kv", "plan.py", "request", "runner.py")
)


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


@cache
def imports() -> list[tuple[Path, frozenset[str]]]:
    return [(path, frozenset(imported_names(tree))) for path, tree in modules()]


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All of a module, without their expressions, which are most of it."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        found = getattr(tree, name, ())
        for node in found if isinstance(found, list) else ():
            yield node
            yield from statements(node)


def imported_names(tree: ast.Module) -> Iterator[str]:
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("library", sorted(OWNERS))
def test_each_outside_library_has_its_owner(library: str) -> None:
    strangers = [
        str(path.relative_to(PACKAGE))
        for path, names in imports()
        if any(name == library or name.startswith(f"{library}.") for name in names)
        and not str(path.relative_to(PACKAGE)).startswith(OWNERS[library] or ("-",))
    ]
    assert strangers == []


def test_the_scheduler_half_of_the_engine_has_no_torch() -> None:
    offenders = [
        str(path)
        for path, names in imports()
        if any(path.is_relative_to(folder) for folder in TORCH_FREE)
        and any(name.split(".")[0] == "torch" for name in names)
    ]
    assert offenders == []


@pytest.mark.parametrize("name", ["core/engine.py", "core/scheduler.py", "request/request.py"])
def test_the_centre_of_the_engine_has_room(name: str) -> None:
    text = (PACKAGE / "engine" / name).read_text("utf-8")
    assert len(text.splitlines()) <= 230
    assert "fmt: skip" not in text


def test_the_environment_is_read_in_the_config_only() -> None:
    offenders = [
        str(path.relative_to(PACKAGE))
        for path, tree in modules()
        if not path.is_relative_to(PACKAGE / "shared/config")
        and any(
            isinstance(node, ast.Attribute)
            and node.attr in ("environ", "getenv")
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
            for node in ast.walk(tree)
        )
    ]
    outside = [name for name in offenders if not name.startswith("cli/embedded/")]
    assert outside == ["__init__.py"]  # how threads of torch wait, before it is imported


def test_no_test_imports_a_private_name() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for text in [path.read_text(encoding="utf-8")]
        # most files name none: parsing them takes seconds
        for name in (imported_names(ast.parse(text)) if PRIVATE_IMPORT.search(text) else ())
        if name.startswith("tokenmesh")
        and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    ]
    assert offenders == []


def test_an_installation_has_no_top_level_kernels() -> None:
    spec = importlib.util.find_spec("kernels")
    assert spec is None or not str(spec.origin).startswith(str(ROOT))


def test_every_package_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(PACKAGE))
        for path, tree in modules()
        if ast.get_docstring(tree) is None and path.stat().st_size > 1
    ]
    assert silent == []
