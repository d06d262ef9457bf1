"""Where packages come from on this machine, as pip or uv is configured."""

import ast
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from typing import Final

from tokenmesh.shared.config.environment import package_index_variables

_CONFIG_S: Final = 30.0


def pip_config() -> dict[str, str]:
    """The options of pip that say where packages come from, by pip itself where it is installed.

    uv is asked by its variables.
    """
    found = package_index_variables()
    try:
        distribution("pip")  # finding the module would run hooks of setuptools, which warn
    except PackageNotFoundError:
        return found
    command = [sys.executable, "-m", "pip", "config", "list"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CONFIG_S)
    except (OSError, subprocess.SubprocessError):
        return found
    sections: dict[str, dict[str, str]] = {}
    for line in done.stdout.splitlines():
        key, equals, text = line.partition("=")
        section, dot, name = key.rpartition(".")
        if equals and dot:
            sections.setdefault(section, {})[name] = str(ast.literal_eval(text))
    # as pip has it: the command's own section over the one of all commands, variables over both
    for section in ("global", "install", "download", ":env:"):
        found |= sections.get(section, {})
    return found
