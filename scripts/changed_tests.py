"""The test files that a change can reach: `make test CHANGED=origin/main`.

The changed files are those that differ from a commit, and those that git does not know yet. A test
file is reached when it is one of them, or imports one, directly or through other modules. What a
test starts as a process counts as imported. A file that is not a module belongs to the modules that
name it or share its folder. A file without an owner, and one on which all tests depend, selects all
tests: one that runs in vain costs seconds, one that is left out hides a defect.
"""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCES: Final = ("tokenmesh", "tests", "benchmarks", "scripts")
EVERYTHING: Final = re.compile(
    r"pyproject\.toml|uv\.lock|Makefile|\.ci/(?!.*\.sha256).*|tests/(?:conftest|again|repeated)\.(?:py|txt)"
    r"|scripts/(?:changed|chosen)_tests\.py"
)
"""Files that say how all tests run."""
COMMAND: Final = "tokenmesh.__main__"
APIS: Final = "tokenmesh.services.gateway.apis."
"""Packages of APIs are below it. Each gateway has them all, by `apis/table.py`."""
TABLE: Final = f"{APIS}table"
TESTS_OF_ALL_APIS: Final = frozenset(
    f"tests.{each}"
    for each in (
        "e2e.test_up",
        "integration.test_bad_input",
        "integration.test_chat",
        "integration.test_document",
        "integration.test_every_text",
    )
)
"""These send requests to a gateway with all of them, whichever it is that has changed."""
COMPUTED: Final[Mapping[str, tuple[str, ...]]] = {
    "tokenmesh.cli.main": ("tokenmesh.cli.",),
    "tokenmesh.cli.service": ("tokenmesh.services.",),
    "tokenmesh.shared.config": ("tokenmesh.shared.config.",),
    "tests.kernels.discovery": ("tokenmesh.kernels.",),
    "tests.kernels.test_dispatch": ("tokenmesh.kernels.",),
    # Their callers name the module.
    "tokenmesh.cli.embedded.fork_server": (),
    "tokenmesh.services.gateway.parsers.registry": (),
    "tokenmesh.engine.grammar.lean_import": (),
    "tokenmesh.shared.parent_death": (),
    # Modules of other projects.
    "tokenmesh.shared.lean_import": (),
    "tokenmesh.services.worker_svc.kv.transports.mooncake": (),
    "tokenmesh.services.worker_svc.kv.transports.nixl": (),
    "tests.engine.test_formats_by_library": (),
    "tests.engine.test_hf_experts": (),
}
"""Modules that a module imports by names that it computes; `a.b.` is every module below `a.b`."""
NAMES_ONLY: Final = frozenset(
    {"tokenmesh.shared.services", "scripts.changed_tests", "tests.left_gateways"}
)
"""These name modules that others import."""
_IMPORTERS: Final = frozenset({"import_module", "run_module", "iter_modules", "walk_packages"})
_PATH: Final = re.compile(r"(/v\d)?/([a-z_]{4,})")
"""The beginning of a path that says something."""
_LEAVES: Final = (ast.Name, ast.expr_context, ast.operator, ast.unaryop, ast.boolop)
_MODULE: Final = re.compile(rf"\b(?:{'|'.join(SOURCES)})(?:\.[A-Za-z_]\w*)+\.?")
_COMMAND: Final = re.compile(r"-m\s+tokenmesh\b|/tokenmesh\Z")
_FILE: Final = re.compile(r"[\w./-]*\w\.py\b")
_NEW: Final = ("ls-files", "-z", "--others", "--exclude-standard")
_READS_ALL: Final = re.compile(r"\brglob\(|\bls-files\b")
_CAN_READ_ALL: Final = re.compile(r"(?:tests|scripts)/(?!conftest)")
ALL: Final = "."
"""A module that reads whole folders of the repository imports this."""


class Module:
    """The names that a source file may import, and the texts in it that may name files."""

    def __init__(self, path: str, source: str) -> None:
        self.name = name_of(path)
        self.names: set[str] = set(COMPUTED.get(self.name, ()))
        """Some of them are no modules but things in one."""
        self.texts: set[str] = set()
        self._path, self._source = path, source
        self._reads_all = _READS_ALL.search(source) is not None
        self._is_package = path.endswith("/__init__.py")
        self._read(ast.parse(source))
        if self.name not in NAMES_ONLY:
            self._take_named_modules()
            if (
                self._reads_all
                and path.startswith(("tests/", "scripts/"))
                and "conftest" not in path
            ):
                self.names.add(ALL)
        if path.startswith("tests/"):
            folders = PurePosixPath(path).parents
            self.names.update(name_of(f"{each}/conftest.py") for each in [*folders][:-1])

    def is_in(self, folder: str) -> bool:
        """Return whether this is a file below a folder of the repository."""
        return self._path.startswith(f"{folder}/")

    def mentions(self, file: str, places: Set[str]) -> bool:
        """Return whether it has a text with this file name, or one that is one of the places."""
        return any(file in text or text.strip("/") in places for text in self.texts)

    def paths(self) -> set[tuple[str, str]]:
        """Return how the paths of URLs among its texts begin: a version or nothing, and a word."""
        found = (_PATH.match(each) for each in self.texts)
        return {(each[1] or "", each[2]) for each in found if each is not None}

    def mentions_api(self, words: re.Pattern[str]) -> bool:
        """Return whether its source, in which a client may have other names, has such a word."""
        return words.search(self._source) is not None

    def _read(self, tree: ast.Module) -> None:
        waiting: list[ast.AST] = [tree]
        while waiting:
            node = waiting.pop()
            match node:
                case ast.Constant(value=str() as text):
                    self.texts.add(text)
                case ast.Expr(value=ast.Constant()):
                    continue  # a docstring
                case ast.If() if _last_name(node.test) == "TYPE_CHECKING":
                    waiting.extend(node.orelse)
                    continue
                case ast.Import():
                    self.names.update(alias.name for alias in node.names)
                case ast.ImportFrom():
                    base = self._base(node)
                    self.names.update((base, *(f"{base}.{alias.name}" for alias in node.names)))
                case ast.List() | ast.Tuple():
                    self._note_process(node.elts)
                case ast.Call():
                    self._note_process(node.args)
                    self._check_computed(node)
            for field in node._fields:
                value = getattr(node, field)
                if isinstance(value, list):
                    waiting.extend(each for each in value if isinstance(each, ast.AST))
                elif isinstance(value, ast.AST) and not isinstance(value, _LEAVES):
                    waiting.append(value)

    def _base(self, node: ast.ImportFrom) -> str:
        parents = self.name.split(".")
        parents = parents[: len(parents) - node.level + self._is_package] if node.level else []
        return ".".join([*parents, *([node.module] if node.module else [])])

    def _note_process(self, words: Sequence[ast.expr]) -> None:
        """Note the module after `-m`: one that is computed may be each that has a command."""
        for flag, module in pairwise(words):
            if not (isinstance(flag, ast.Constant) and flag.value == "-m"):
                continue
            if not isinstance(module, ast.Constant):
                # In the package, callers name it.
                if not self.is_in("tokenmesh"):
                    self.names.update((COMMAND, "benchmarks.", "scripts."))
            elif module.value == "tokenmesh":
                self.names.add(COMMAND)

    def _check_computed(self, call: ast.Call) -> None:
        called = _last_name(call.func)
        is_known = self.name in COMPUTED or self._reads_all
        if called not in _IMPORTERS or is_known or not call.args:
            return
        first = call.args[0]
        start = first.values[0] if isinstance(first, ast.JoinedStr) else first
        if not isinstance(start, ast.Constant):
            raise NotImplementedError(
                f"{self._path}:{call.lineno}: add what it imports to COMPUTED"
            )

    def _take_named_modules(self) -> None:
        for text in self.texts:
            self.names.update(_MODULE.findall(text))
            if _COMMAND.search(text) and not self.is_in("tokenmesh"):
                self.names.add(COMMAND)
            for file in _FILE.findall(text):
                # One of the repository, or one in this folder.
                self.names.update((name_of(file), name_of(str(Path(self._path).parent / file))))


def name_of(path: str) -> str:
    """The module that a file of the repository is imported as."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


class Graph:
    """The modules of a repository, and which of them import a module."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        """Read sources by their path in the repository. Raises SyntaxError."""
        self._modules = [Module(path, source) for path, source in sources.items()]
        self._by_name = {each.name: each for each in self._modules}
        self._folders = defaultdict[str, list[str]](list)
        for path in sources:
            self._folders[str(PurePosixPath(path).parent)].append(name_of(path))
        self._importers = defaultdict[str, set[str]](set)
        for module in self._modules:
            for name in module.names:
                self._importers[name].add(module.name)
                # Importing a.b.c runs a and a.b.
                for parent in _parents(name.removesuffix(".")) if name != ALL else ():
                    self._importers[parent].add(module.name)

        self._imported: dict[str, set[str]] = {}
        """It keeps the answers of `_imports`."""
        self._users_of_all = [
            (name, users) for name, users in self._importers.items() if name.endswith(".")
        ]
        """Those of each module whose name begins so."""

    def needs(self, module: str) -> set[str]:
        """Return the module and all that it imports, directly or through others; `ALL` is among
        them where one reads whole folders."""
        found = {module}
        waiting = [module]
        while waiting:
            new = self._imports(waiting.pop()) - found
            waiting.extend(new)
            found |= new
        return found

    def reaching(self, changed: Iterable[str]) -> set[str] | None:
        """The modules that changed files reach; None stands for all."""
        found: set[str] = set()
        for path in changed:
            if EVERYTHING.fullmatch(path):
                return None
            owners = self.owners(path)
            if not owners:
                return None
            found.update(owners)
        # `apis/table.py` is not in a package of one
        is_in_apis = bool(found) and all(
            name.startswith(APIS) and "." in name[len(APIS) :] for name in found
        )
        if found:
            found.update(self._importers[ALL])
        if not is_in_apis:
            return self._closure(found)
        own = self._closure(found, without=TABLE)
        apis = {name[len(APIS) :].split(".")[0] for name in own if name.startswith(APIS)}
        return own | self._of_apis(apis)

    def _imports(self, name: str) -> set[str]:
        found = self._imported.get(name)
        if found is not None:
            return found
        found = self._imported[name] = set()
        if name not in self._by_name:
            return found
        for each in self._by_name[name].names:
            if each == ALL:
                found.add(ALL)
            elif each.endswith("."):
                found.update(other for other in self._by_name if other.startswith(each))
            found.update(other for other in (each, *_parents(each)) if other in self._by_name)
        return found

    def _closure(self, found: Set[str], without: str = "") -> set[str]:
        """Return these modules and all that import them, but for one. Then programs that start
        services by their names count as having no API."""
        closure = set(found)
        waiting = [*found]
        while waiting:
            name = waiting.pop()
            used_by = self._importers.get(name, set()).union(
                *(
                    users
                    for folder, users in self._users_of_all
                    if name.startswith(folder)
                    if not (without and name.startswith(APIS) and APIS.startswith(folder))
                )
            )
            new = used_by - closure - {without}
            waiting.extend(new)
            closure.update(new)
        return closure

    def _of_apis(self, apis: Set[str]) -> set[str]:
        """Return the tests that reach these APIs by a gateway, and the programs that have one.

        Every gateway has every API, but a test that names none of its paths, nor the API itself,
        sends no request to it. Its helpers count as it does, if they start no gateway themselves.
        """
        users = self._closure({TABLE})
        paths = {
            path
            for name, each in self._by_name.items()
            if name.startswith(APIS) and name[len(APIS) :].split(".")[0] in apis
            for path in each.paths()
        }
        # `"/v1/messages"`, `client.messages.create(`, and where paths do not say it its name
        ways = [rf"{version}/{word}\b" for version, word in paths]
        ways += [rf"\.{word}\.[\w.]+\(" for version, word in paths if version == "/v1"]
        ways += apis - {word for _, word in paths}
        words = re.compile(f"(?i){'|'.join(ways)}")
        named = {name for name, each in self._by_name.items() if each.mentions_api(words)}
        helpers = {name for name in named - users if name.startswith("tests.")}
        named |= self._closure(helpers)
        is_test = re.compile(r"tests\..*\btest_\w+").fullmatch
        return {
            name
            for name in users
            if not is_test(name) or name in named or name in TESTS_OF_ALL_APIS
        }

    def owners(self, path: str) -> list[str]:
        """The modules that may read a file, or the one that it is."""
        if path.endswith(".py"):
            return [name_of(path)]
        file = PurePosixPath(path)
        folders = [str(each) for each in file.parents][:-1]
        # Paths are built of such texts: `ROOT / "docs/guides"`, `Path(__file__).parent / "golden"`.
        places = {path, *(end for each in folders for end in _ends(each))}
        # A word in the package has other meanings, too, and the package reads its own files only.
        words = {*places, file.parent.name}
        if file.parts[0] not in SOURCES:
            words.update(each.name for each in file.parents)
        words.discard("")
        owners = [
            module.name
            for module in self._modules
            if module.is_in(file.parts[0]) or not module.is_in("tokenmesh")
            if module.mentions(file.name, places if module.is_in("tokenmesh") else words)
        ]
        if file.name != "README.md":  # that of a folder is for readers only
            neighbors = next((self._folders[each] for each in folders if each in self._folders), [])
            owners.extend(neighbors)
        return owners


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _ends(path: str) -> Iterator[str]:
    """A path without some of its first folders, of two parts or more."""
    while "/" in path:
        yield path
        path = path.partition("/")[2]


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return [each for each in done.stdout.decode().split("\0") if each]


def sources() -> dict[str, str]:
    """Every Python file of the repository, by its path."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in SOURCES
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def all_files() -> list[str]:
    """Every file of the repository that git does not ignore."""
    listed = {*_git("ls-files", "-z"), *_git(*_NEW)}
    return sorted(path for path in listed if (ROOT / path).is_file())


def tests_among(files: Iterable[str]) -> list[str]:
    """The files of tests among these."""
    return [path for path in files if re.match(r"tests/(?:.*/)?test_[^/]*\.py\Z", path)]


def chosen_files(graph: Graph, tests: Sequence[str], since: str) -> list[str]:
    """The files of tests that a change since this commit reaches."""
    changed = {*_git("diff", "-z", "--name-only", "--no-renames", since, "--"), *_git(*_NEW)}
    if not changed:
        raise SystemExit(f"no file differs from {since}")
    reached = graph.reaching(changed)
    return [path for path in tests if reached is None or name_of(path) in reached]
