"""What one service needs, as a requirements file: its extra and the command line, nothing else.

An image of one service installs these requirements and then the wheel with --no-deps.
`python compose/requirements.py gateway` prints them.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Final

COMMAND_LINE: Final = "cli"
_EXTRAS: Final = re.compile(r"\[([\w,]+)\]$")


def requirements(pyproject: Path, service: str) -> list[str]:
    """The requirements of a service, those of the extras it refers to included.

    KeyError when there is no such extra.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    found: set[str] = set()
    waiting, seen = [service, COMMAND_LINE], set()
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


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    folder = here if (here / "pyproject.toml").exists() else here.parent
    sys.stdout.write("\n".join(requirements(folder / "pyproject.toml", sys.argv[1])) + "\n")
