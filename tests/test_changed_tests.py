"""The tests that a change selects: none that it can reach may be missing."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from scripts import changed_tests, chosen_tests
from scripts.changed_tests import Graph, name_of, sources
from scripts.chosen_tests import ALWAYS, EngineTests

ROOT = Path(__file__).resolve().parent.parent
TREE = {
    "tokenmesh/__init__.py": "",
    "tokenmesh/__main__.py": "def main():\n    from tokenmesh.cli.service import run\n",
    "tokenmesh/cli/service.py": "import_module(found)\n",
    "tokenmesh/services/a/__init__.py": "",
    "tokenmesh/services/a/main.py": "from tokenmesh.services.a import rules\n",
    "tokenmesh/services/a/rules.py": "",
    "tokenmesh/services/b/main.py": "if TYPE_CHECKING:\n    import tokenmesh.services.a.rules\n",
    "tokenmesh/shared/words.py": '"""See tokenmesh.services.a.rules."""\n',
    "scripts/page.py": "from tokenmesh.shared import words\n",
    "tests/conftest.py": "",
    "tests/fakes/mesh.py": 'COMMAND = [python, "-m", "tokenmesh", "up"]\n',
    "tests/a/conftest.py": "import tokenmesh.shared.words\n",
    "tests/a/test_rules.py": "from tokenmesh.services.a.rules import x\n",
    "tests/a/test_patched.py": 'patch("tokenmesh.services.a.rules.x")\n',
    "tests/a/test_child.py": 'run("-c", "from tokenmesh.services.b.main import run")\n',
    "tests/b/test_page.py": 'PAGE = ROOT / "docs/page.md"\nfrom scripts.page import write\n',
    "tests/b/c/test_mesh.py": "from tests.fakes.mesh import COMMAND\n",
    "tests/b/test_golden.py": 'FILES = Path(__file__).parent / "golden"\n',
    "tests/test_all.py": 'ROOT.rglob("*.py")\n',
    "tests/b/test_gone.py": "from tests.fakes import gone\n",
}
A = {"a/test_rules", "a/test_patched", "a/test_child"}


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("tokenmesh/services/a/rules.py", {"a/test_rules", "a/test_patched", "b/c/test_mesh"}),
        ("tokenmesh/services/a/__init__.py", {"a/test_rules", "a/test_patched", "b/c/test_mesh"}),
        ("tokenmesh/services/a/main.py", {"b/c/test_mesh"}),
        ("tokenmesh/services/b/main.py", {"a/test_child", "b/c/test_mesh"}),
        ("tokenmesh/services/new/main.py", {"b/c/test_mesh"}),
        ("tokenmesh/shared/words.py", {*A, "b/test_page"}),
        ("tests/a/conftest.py", A),
        ("tests/a/test_rules.py", {"a/test_rules"}),
        ("tests/fakes/gone.py", {"b/test_gone"}),
        ("docs/page.md", {"b/test_page"}),
        ("tests/b/golden/data.bin", {f"b/{n}" for n in ("test_page", "test_golden", "test_gone")}),
        ("tokenmesh/services/a/kernel.c", {"a/test_rules", "a/test_patched", "b/c/test_mesh"}),
        ("unknown.txt", None),
        ("pyproject.toml", None),
        ("tests/conftest.py", None),
    ],
)
def test_a_change_selects_the_tests_that_it_reaches(changed: str, reached: set[str] | None) -> None:
    found = Graph(TREE).reaching([changed])
    if reached is None:
        assert found is None
        return
    assert found is not None
    tests = {each for each in TREE if "test_" in each and name_of(each) in found}
    assert tests == {f"tests/{each}.py" for each in {*reached, "test_all"}}


API = "tokenmesh/services/gateway/apis"
GATEWAY = {
    f"{API}/table.py": "import tokenmesh.services.gateway.apis.one.api\n"
    "import tokenmesh.services.gateway.apis.two.api\n",
    f"{API}/one/api.py": 'PATH = "/v1/firsts/{name}"\n',
    f"{API}/two/api.py": "from tokenmesh.services.gateway.apis.two.routes import PATH\n",
    f"{API}/two/routes.py": 'PATH = "/v2/seconds"\n',
    "tokenmesh/services/gateway/gateway.py": "import tokenmesh.services.gateway.apis.table\n",
    "tests/fakes/mesh.py": "import tokenmesh.services.gateway.gateway\n",
    "tests/fakes/asking.py": 'post("/v1/firsts/a")\n',
    "tests/a/test_path.py": 'import tests.fakes.mesh\npost("/v2/seconds")\n',
    "tests/a/test_client.py": "import tests.fakes.mesh\nclient.firsts.create()\n",
    "tests/a/test_helper.py": "import tests.fakes.mesh\nimport tests.fakes.asking\n",
    "tests/a/test_neither.py": "import tests.fakes.mesh\n",
    "tests/a/test_part.py": "from tokenmesh.services.gateway.apis.two import routes\n",
    "tests/integration/test_chat.py": "import tests.fakes.mesh\n",
}


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        (f"{API}/one/api.py", {"a/test_client", "a/test_helper", "integration/test_chat"}),
        (f"{API}/two/api.py", {"a/test_path", "integration/test_chat"}),
        (f"{API}/two/routes.py", {"a/test_path", "a/test_part", "integration/test_chat"}),
    ],
)
def test_an_api_selects_the_tests_that_send_requests_to_it(changed: str, reached: set[str]) -> None:
    found = Graph(GATEWAY).reaching([changed])
    assert found is not None
    tests = {each for each in GATEWAY if "test_" in each and name_of(each) in found}
    assert tests == {f"tests/{each}.py" for each in reached}
    # what is not one of the APIs, or is changed together with them, selects all
    for others in (f"{API}/table.py", "tokenmesh/services/gateway/gateway.py"):
        for changes in ([others], [changed, others]):
            found = Graph(GATEWAY).reaching(changes)
            assert found is not None
            assert {"tests.a.test_neither", "tests.integration.test_chat"} <= found


def test_a_module_that_is_imported_by_an_unknown_name_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"tests/test_x\.py:1: add what it imports"):
        Graph({"tests/test_x.py": "importlib.import_module(name)\n"})


IMPORTED = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps([name for name in sys.modules if name.startswith(("tokenmesh", "tests"))]))
"""


@pytest.mark.timeout(60)
def test_every_module_that_is_imported_while_a_file_is_collected_selects_it() -> None:
    graph, files = Graph(sources()), {name_of(path): path for path in sources()}
    missing = []

    @functools.cache
    def reaching(module: str) -> set[str] | None:
        # an API alone does not select what imports it for its requests to others
        is_of_api = module.startswith(changed_tests.APIS)
        return graph.reaching(
            [files[each] for each in (module, changed_tests.TABLE)[: 1 + is_of_api]]
        )

    def check(test: str, modules: list[str]) -> None:
        for module in modules:
            found = reaching(module)
            if found is not None and test not in found:
                missing.append((test, module))

    # What the modules of this process, all tests in a run of all, have of others.
    for name, module in [*sys.modules.items()]:
        if name in files:
            used = {str(getattr(each, "__module__", "")) for each in vars(module).values()}
            check(name, sorted((used & files.keys()) - {name}))
    # And exactly, in a process of its own, for some that import in odd ways.
    for name in ("tests.unit.cli.test_serve", "tests.unit.gateway.parsers.test_registry"):
        command = [sys.executable, "-c", IMPORTED, "tests.conftest", name]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        check(name, [each for each in json.loads(done.stdout) if each in files])
    assert missing == []


def commit(
    files: Mapping[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """A repository with these files; returns what runs git in it."""

    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)

    for path, source in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(source)
    git("init")
    git("add", ".")
    git("commit", "-m", "All")
    for module in (changed_tests, chosen_tests):
        monkeypatch.setattr(module, "ROOT", folder)
    return git


def test_the_changed_files_are_those_of_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    git = commit(TREE, tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["chosen_tests.py", "HEAD"])
    with pytest.raises(SystemExit, match="no file differs from HEAD"):
        chosen_tests.main()
    (tmp_path / "tests/a/test_new.py").write_text("")
    git("mv", "tests/fakes/mesh.py", "tests/fakes/moved.py")
    chosen_tests.main()
    written = capsys.readouterr()
    chosen = [f"tests/{each}.py" for each in ("a/test_new", "b/c/test_mesh", "test_all")]
    assert written.out.split() == chosen
    assert written.err.startswith("3 of 9 files")


ENGINE = {
    **dict.fromkeys(ALWAYS, ""),
    ".ci/run": "run docs/models.md",
    "docs/models.md": "",
    "docs/other.md": "",
    "tokenmesh/__init__.py": "",
    "tokenmesh/engine/model.py": "from tokenmesh.shared import words\n",
    "tokenmesh/engine/rows.c": "",
    "tokenmesh/shared/words.py": "",
    "tokenmesh/shared/others.py": "",
    "tokenmesh/services/a.py": "import tokenmesh.engine.model\n",
    "tests/conftest.py": "",
    "tests/engine/test_a.py": "import tokenmesh.services.a\n",
    "tests/engine/test_all.py": 'ROOT.rglob("*.py")\n',
    "tests/engine/test_model.py": "from tokenmesh.engine import model, new\nPAGE = 'models.md'\n",
    "tests/unit/test_words.py": "import tokenmesh.shared.words\nPAGE = 'other.md'\n",
}


@pytest.mark.parametrize(
    ("file", "is_input"),
    [
        *((path, True) for path in ALWAYS),
        ("tokenmesh/engine/model.py", True),
        ("tokenmesh/engine/new.py", True),
        ("tokenmesh/engine/rows.c", True),
        ("tokenmesh/shared/words.py", True),
        ("tests/conftest.py", True),
        ("tests/engine/conftest.py", True),
        ("tests/engine/test_model.py", True),
        ("tests/engine/test_a.py", False),
        ("docs/models.md", True),
        ("unknown.txt", True),
        ("docs/other.md", False),
        ("tokenmesh/shared/others.py", False),
        ("tokenmesh/services/a.py", False),
    ],
)
def test_tests_of_the_engine_that_passed_run_again_when_an_input_changes(
    file: str, is_input: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(ENGINE, tmp_path, monkeypatch)

    def digest() -> str:
        engine = EngineTests(Graph(sources()), changed_tests.all_files())
        assert engine.files == ["tests/engine/test_model.py"]
        return engine.digest(tmp_path)

    before = digest()
    (tmp_path / file).write_text("changed = 1\n" + ENGINE.get(file, ""))
    assert (digest() != before) is is_input


def test_tests_of_the_engine_are_left_out_once_they_have_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used, root = tmp_path / "used", tmp_path / "repository"
    used.mkdir()
    commit(ENGINE, root, monkeypatch)

    def main(*words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["chosen_tests.py", *words])
        chosen_tests.main()
        return capsys.readouterr().out.split()

    assert main() == ["tests"]
    assert main("--engine", str(used)) == ["tests/engine/test_model.py"]
    with pytest.raises(SystemExit, match="no test has run"):
        main("--record", str(used))
    (used / "1").write_text("tokenmesh/engine/model.py\ntokenmesh/shared/others.py\n")
    with pytest.raises(SystemExit, match=r"do not name: tokenmesh/shared/others\.py"):
        main("--record", str(used))
    (used / "1").write_text("tokenmesh/engine/model.py\n.venv/module.py")
    main("--record", str(used))
    rest = [f"tests/{each}.py" for each in ("engine/test_a", "engine/test_all", "unit/test_words")]
    assert main() == rest
    with (root / "tokenmesh/shared/words.py").open("a") as words:
        words.write("x = 1\n")
    assert main("HEAD") == ["tests"]
    with pytest.raises(SystemExit, match="files have changed while the tests ran"):
        main("--record", str(used))
