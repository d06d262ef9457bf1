"""What the package with extras needs, as a requirements file: `requirements.py gateway` prints it.

The command line's requirements are always part of it. Every package has the version and the hashes
of `uv.lock`. torch and triton are left out: they come from an index of their own, which differs by
device. Images and scripts/install.sh install this with --no-deps --require-hashes, and then the
package.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

OWN_INDEX: Final = frozenset(("torch", "triton"))
_EXTRAS: Final = re.compile(r"\[([\w,]+)\]$")
_NAME: Final = re.compile(r"^[\w.-]+")


def requirements(pyproject: Path, *wanted: str) -> list[str]:
    """The requirements of the package with extras, those that they refer to included.

    KeyError when there is no such extra.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    found: set[str] = set(project["dependencies"])
    waiting, seen = list(wanted), set()
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in extras[extra]:
            name, *own = _EXTRAS.split(requirement)[:2]
            if own and name == project["name"]:
                waiting += own[0].split(",")
            else:
                found.add(requirement)
    return sorted(found)


def locked(lock: Path, wanted: list[str]) -> list[str]:
    """Every package that the requirements bring, as lines of a requirements file with hashes.

    KeyError for a requirement that the lock does not have.
    """
    packages: dict[str, list[dict[str, Any]]] = {}
    for each in tomllib.loads(lock.read_text(encoding="utf-8"))["package"]:
        packages.setdefault(each["name"], []).append(each)
    waiting: list[dict[str, Any]] = [{"name": _normalized(each)} for each in wanted]
    markers: dict[tuple[str, str], set[str]] = {}
    seen = set()
    while waiting:
        edge = waiting.pop()
        key = (edge["name"], edge.get("version"), tuple(edge.get("extra", ())), edge.get("marker"))
        if key in seen or edge["name"] in OWN_INDEX:
            continue
        seen.add(key)
        for package in packages[edge["name"]]:
            if edge.get("version", package["version"]) == package["version"]:
                place = (package["name"], package["version"])
                markers.setdefault(place, set()).add(_marker(edge, package))
                waiting += _edges(package, edge)
    return [
        line
        for (name, version), places in sorted(markers.items())
        for line in _lines(name, version, places, packages[name])
    ]


def _normalized(requirement: str) -> str:
    match = _NAME.match(requirement)
    assert match is not None, f"a requirement without a name: {requirement}"
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _marker(edge: dict[str, Any], package: dict[str, Any]) -> str:
    """Where this version is needed; empty: everywhere."""
    if "marker" in edge:
        return str(edge["marker"])
    return " or ".join(f"({each})" for each in package.get("resolution-markers", ()))


def _edges(package: dict[str, Any], edge: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from package.get("dependencies", ())
    for extra in edge.get("extra", ()):
        yield from package.get("optional-dependencies", {}).get(extra, ())


def _lines(
    name: str, version: str, markers: set[str], versions: list[dict[str, Any]]
) -> Iterator[str]:
    package = next(each for each in versions if each["version"] == version)
    files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else [])]
    where = "" if "" in markers else " ; " + " or ".join(f"({each})" for each in sorted(markers))
    yield f"{name}=={version}{where} \\"
    hashes = sorted(each["hash"] for each in files)
    yield from (f"    --hash={each} \\" for each in hashes[:-1])
    yield f"    --hash={hashes[-1]}"


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    folder = here if (here / "pyproject.toml").exists() else here.parent
    needed = requirements(folder / "pyproject.toml", *sys.argv[1:])
    sys.stdout.write("\n".join(locked(folder / "uv.lock", needed)) + "\n")
