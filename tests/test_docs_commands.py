"""Commands and files in the documentation parse: flags exist, bodies are JSON, settings load."""

import argparse
import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

from tests.fakes.pages import PAGES, ROOT, blocks, commands, on_every_page, spans
from tokenmesh.cli.arguments import arrange
from tokenmesh.cli.main import COMMANDS, WITH_SETTINGS, known_flags
from tokenmesh.cli.main import run as run_command
from tokenmesh.cli.vllm_flags import FIXED
from tokenmesh.services.gateway.apis.table import APIS
from tokenmesh.services.gateway.core.tenancy.auth import read_key_file
from tokenmesh.shared.config import load_settings
from tokenmesh.shared.services import SERVICE_BY_NAME

ROUTE = re.compile(r"""["'](/[\w/{}]+)["']""")
NAMED_ROUTE = re.compile(r"""^(\w+): Final = ["'](/[\w/]*)["']""", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def words_of(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []


def calls_of(page: Path, program: str) -> Iterator[list[str]]:
    """The arguments with which a program is called, in blocks and in the text."""
    for line in (*commands(page), *spans(page)):
        # each part of a pipe or of a subshell is a command of its own
        for part in re.split(r"\|\||&&|[|;()]|\$\(", line):
            words = words_of(part.strip())
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words and Path(words[0]).name == program:
                yield words[1:]


@on_every_page
def test_our_commands_have_the_flags_that_are_shown(page: Path) -> None:
    for words in calls_of(page, "tokenmesh"):
        if not words or words[0][0] in "-<":
            continue
        assert words[0] in COMMANDS, words
        known = flags_of(tuple(words))
        if words[0] in WITH_SETTINGS:
            arrange(words[1:], known)  # raises ConfigError for another flag
        given = {each.partition("=")[0] for each in words[1:] if each.startswith("--")}
        assert given <= known, words
        if words[0] == "serve" and len(words) > 1 and words[1][0] not in "<-":
            assert words[1] in SERVICE_BY_NAME


@cache
def flags_of(words: tuple[str, ...]) -> frozenset[str]:
    """Every flag that a command takes, and for `bench` the command of that group."""
    if words[0] == "run":
        return known_flags("run") | known_flags("up")
    if words[0] != "bench":
        return known_flags(words[0])
    with redirect_stdout(StringIO()) as shown, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "300")
        assert run_command([*words[:2], "--help"]) == 0, words
    return frozenset(OPTION.findall(shown.getvalue()))


def test_there_are_commands_to_check() -> None:
    found = [words for page in PAGES for words in calls_of(page, "tokenmesh")]
    assert len(found) > 20
    commands_shown = {words[0] for words in found if words}
    assert {"run", "list", "pull", "ps", "quantize", "bench"} <= commands_shown
    assert ["drain", "ID"] in found


@on_every_page
def test_modules_that_are_run_exist_and_know_their_flags(page: Path) -> None:
    for program in ("python", "python3", "python3.11"):
        for words in calls_of(page, program):
            sources = sources_of(words)
            if sources is None:
                continue
            given = {each.partition("=")[0] for each in words if each.startswith("--")}
            unknown = given.difference(*map(flags_in, sources))
            assert unknown - {"--help", "--"} == set(), words


@cache
def flags_in(source: Path) -> set[str]:
    return {
        node.value
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("--")
    }


def sources_of(words: list[str]) -> list[Path] | None:
    """Files of a module or script of this repository that is run, and of its folder."""
    if words[:1] == ["-m"] and len(words) > 1:
        if words[1].partition(".")[0] not in ("benchmarks", "tokenmesh") or "NAME" in words[1]:
            return None
        path = ROOT / words[1].replace(".", "/")
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    elif words and words[0].startswith("scripts/"):
        path = ROOT / words[0]
    else:
        return None
    assert path.is_file(), words
    return list(path.parent.rglob("*.py"))


@on_every_page
def test_tests_that_are_named_exist(page: Path) -> None:
    for words in calls_of(page, "pytest"):
        paths = [each for each in words if each.startswith("tests/")]
        assert [each for each in paths if not list(ROOT.glob(each))] == []


@on_every_page
def test_targets_of_make_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for words in calls_of(page, "make"):
        named = [each for each in words if re.fullmatch(r"[a-z-]+", each) and each[0] != "-"]
        assert set(named) <= targets, words


@on_every_page
def test_files_of_docker_compose_exist(page: Path) -> None:
    for words in calls_of(page, "docker"):
        if words[:1] == ["compose"]:
            assert words[1] == "-f", "from the root of the repository"
            assert (ROOT / words[2]).is_file()


@cache
def routes() -> list[re.Pattern[str]]:
    folder = ROOT / "tokenmesh/services/gateway"
    found = set[str]()
    for path in folder.rglob("*.py"):
        text = path.read_text()
        # some paths are put together from a constant of their file
        for name, value in NAMED_ROUTE.findall(text):
            text = text.replace(f"{{{name}}}", value)
        found.update(ROUTE.findall(text.replace("{{", "{").replace("}}", "}")))
    found.update(path for api in APIS for _, path in api.answers)
    return [re.compile(re.sub(r"\{[^}]+\}", "[^/]+", each)) for each in sorted(found)]


@on_every_page
def test_requests_are_to_routes_that_exist_with_json_bodies(page: Path) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("-d", "--data")
    for words in calls_of(page, "curl"):
        for each in words:
            path = re.match(r"^(?:https?://127\.0\.0\.1:8000|\$URL|\.\.\.)(/[^?]*)", each)
            assert path is None or any(route.fullmatch(path[1]) for route in routes()), each
        body = parser.parse_known_args([each for each in words if each])[0].data
        assert body is None or json.loads(body)


@on_every_page
def test_files_of_settings_load(page: Path) -> None:
    for text in blocks(page, "toml"):
        names = set(tomllib.loads(text))
        with NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(text)
            file.flush()
            if names & {"tenants", "keys"}:
                read_key_file(Path(file.name), 1 << 20)
            else:
                load_settings(Path(file.name))


@on_every_page
def test_python_in_pages_parses(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text if not text.startswith('"') or '": ' not in text[:60] else f"{{{text}}}")


@cache
def options() -> tuple[set[str], str]:
    """Flags of our commands, and the sources of the programs that have others."""
    ours = {flag for command in COMMANDS if command != "bench" for flag in known_flags(command)}
    ours |= {flag.partition(".")[0] for flag in ours} | {f"--{name}" for name in FIXED}
    others = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("benchmarks", "scripts", "tokenmesh/cli")
        for path in (ROOT / folder).rglob("*.py")
    )
    return ours, others


@on_every_page
def test_options_in_the_text_exist(page: Path) -> None:
    ours, others = options()
    foreign = {"--no-deps", "--build-arg", "--scale", "--latency", "--enable-feature"}
    # torchrun's
    foreign |= {"--node-rank", "--master-addr", "--max-restarts", "--nproc-per-node"}
    named = {
        option
        for text in spans(page)
        if not text.startswith(("docker", "pip", "unzip"))
        for option in OPTION.findall(text)
    }
    assert {each for each in named - ours - foreign if f'"{each}"' not in others} == set()
