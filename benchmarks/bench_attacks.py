"""Attacks on one gateway of a real `tokenmesh up --engine sim`, and what others notice of them.

`python -m benchmarks.bench_attacks --seconds 60`. Each attack runs from 8 connections, without a
key and with that of a tenant of 60 requests a minute; meanwhile `/livez` is asked and another
tenant has 8 streams. Exits 1 where a bar of `attacks_run/score.py` is not held.
The attack on TLS has a mesh of its own, and so have those by texts and reads.
"""

import argparse
import asyncio
import hashlib
import json
import os
import ssl
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.attacks_run.model import long_model
from benchmarks.attacks_run.phase import Phase, Target
from benchmarks.attacks_run.requests import NAMES, READS, SILENT_TLS, TEXTS
from benchmarks.attacks_run.score import Noticed, Score, score, table
from benchmarks.serve.memory import MemoryWatch, mesh_processes
from benchmarks.serve.own_mesh import own_mesh
from benchmarks.serve.results import environment, write_json
from tests.fakes.certificates import FIRST
from tokenmesh.shared.catalog import BUILT_IN

INNOCENT, ATTACKER, ADMIN = "innocent-key", "attacker-key", "admin-key"
_SETTLE_S = 1.0
_LONG, _TLS = "long", "tls"


def _kind_of(name: str) -> str:
    return _TLS if name == SILENT_TLS else _LONG if name in TEXTS or name in READS else ""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each attack")
    parser.add_argument("--connections", type=int, default=8, help="of the attacker")
    parser.add_argument("--attack", action="append", choices=NAMES, help="default: all")
    parser.add_argument("--out", type=Path, help="add the numbers to the runs in this JSON")
    parser.add_argument("--key-only", action="store_true", help="no attacks without a key")
    return parser.parse_args(arguments)


@dataclass(slots=True)
class Run:
    """All attacks on one mesh, after a phase without any."""

    options: argparse.Namespace
    target: Target
    model: str
    watch: MemoryWatch
    scores: list[Score] = field(default_factory=list)

    async def all(self, names: Sequence[str]) -> None:
        """Each without a key and, where it sends one, with the tenant's."""
        await self._phase(_SETTLE_S)
        quiet = await self._phase(self.options.seconds)
        self.scores.append(score("none", quiet, quiet, 0))
        print(table(self.scores), flush=True)
        for name in names:
            for key in self._keys_of(name):
                self.scores.append(await self._one(name, key, quiet))
                print(table(self.scores[-1:]).splitlines()[1], flush=True)

    def _keys_of(self, name: str) -> tuple[str, ...]:
        if name == SILENT_TLS:
            return ("",)
        return (ATTACKER,) if self.options.key_only or name in READS else ("", ATTACKER)

    async def _one(self, name: str, key: str, quiet: Noticed) -> Score:
        attack = asyncio.create_task(self._attacked(name, key))
        noticed = await self._phase(self.options.seconds + _SETTLE_S)
        answered, cores = await attack
        return score(f"{name}, {'key' if key else 'no key'}", quiet, noticed, answered, cores)

    async def _phase(self, seconds: float) -> Noticed:
        return await Phase(self.target, self.model, self.watch).run(seconds)

    async def _attacked(self, name: str, key: str) -> tuple[int, float]:
        """Run the attacker: how many of its requests were answered, and the cores it used."""
        options = self.options
        command = [sys.executable, "-m", "benchmarks.attacks_run.attacker", name]
        command += ["--port", str(self.target.port), "--model", self.model]
        command += ["--seconds", str(options.seconds), "--connections", str(options.connections)]
        command += ["--key", key] if key else []
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        found = json.loads(output)
        return found["answered"], found["cpu_s"] / options.seconds


async def run(options: argparse.Namespace, names: Sequence[str], kind: str) -> list[Score]:
    """Attack a mesh of one's own: a plain one, behind a certificate, or with a long model."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "keys.toml").write_text(_keys())
        arguments = ["--engine", "sim", "--keys-file", str(folder / "keys.toml")]
        context: ssl.SSLContext | None = None
        if kind == _LONG:
            model = long_model(folder / "model")
            arguments += ["--model", str(model), "--no-allow-special-tokens-in-content"]
        else:
            arguments += ["--model", BUILT_IN]
        if kind == _TLS:
            certificate = folder / "certificate.pem"
            certificate.write_text(FIRST)
            arguments += ["--ssl-certfile", str(certificate)]
            os.environ["SSL_CERT_FILE"] = str(certificate)
            context = ssl.create_default_context()
        scheme = "https" if kind == _TLS else "http"
        async with own_mesh(arguments, {}, folder / "mesh.log", scheme) as url:
            port = urlsplit(url).port
            assert port is not None
            target = Target(port, INNOCENT, ADMIN, context)
            found = Run(options, target, await _model(target), MemoryWatch(mesh_processes(port)))
            await found.all(names)
    return found.scores


def _keys() -> str:
    lines = ["[tenants.innocent]", "[tenants.attacker]", "requests_per_minute = 60"]
    lines += ["[tenants.operator]", "admin = true"]
    for tenant, key in (("innocent", INNOCENT), ("attacker", ATTACKER), ("operator", ADMIN)):
        digest = hashlib.sha256(key.encode()).hexdigest()
        lines += ["[[keys]]", f'sha256 = "{digest}"', f'tenant = "{tenant}"']
    return "\n".join(lines)


async def _model(target: Target) -> str:
    answer = await target.ask("/v1/models", target.key)
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["data"][0]["id"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, print and save; 1 where a bar is not held."""
    options = parse(arguments)
    chosen = options.attack or NAMES
    scores: list[Score] = []
    for kind in ("", _LONG, _TLS):
        names = [each for each in chosen if _kind_of(each) == kind]
        if names:
            scores += asyncio.run(run(options, names, kind))
    if options.out:
        earlier = json.loads(options.out.read_bytes())["runs"] if options.out.exists() else []
        facts = {"seconds": options.seconds, "connections": options.connections}
        rows = [each.as_json() for each in scores]
        run_ = {"config": facts, "environment": environment(), "scores": rows}
        write_json(options.out, {"runs": [*earlier, run_]})
    return 1 if any(each.failures() for each in scores) else 0


if __name__ == "__main__":
    sys.exit(main())
