"""Two tenants, one flooding: the other's TTFT alone and during it. Exits with 1 above `--bound`.

A mesh of its own with `sim` workers, real processes, settings at their defaults but for the rows of
a worker, which are few so that a small machine can send a flood. Both tenants send requests of the
same kinds at random times, the flood `--factor` times as many, which is several times what the
workers can do. The quiet tenant sends the same (other prompts, the same lengths and times) in both
halves.
"""

import argparse
import asyncio
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final

import uvloop

from benchmarks.chaos_run.cluster import Cluster
from benchmarks.options import add_cluster_options
from benchmarks.replay_run.player import PlayedRequest, Player
from benchmarks.replay_run.prompts import Prompts
from benchmarks.replay_run.trace import BLOCK_TOKENS, Entry
from benchmarks.serve.results import environment, write_json
from tokenmesh.cli.bench.client import Target
from tokenmesh.cli.bench.report import percentile
from tokenmesh.cli.bench.workload import first_model
from tokenmesh.cli.embedded.private import private_folder
from tokenmesh.shared.config import Settings
from tokenmesh.shared.config.loader import DEMO_MODEL, load_settings

QUIET: Final = "quiet"
FLOOD: Final = "flood"
_PROMPTS: Final = (32, 128, 512, 1500)
_OUTPUTS: Final = (16, 64, 160)
_TIMEOUT_S: Final = {QUIET: 60.0, FLOOD: 10.0}
"""The flood's clients leave after a while; what they asked for must end then."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, prog="bench_fairness")
    add = parser.add_argument
    add("--rate", type=float, default=2.0, help="requests a second of the quiet tenant")
    add("--factor", type=float, default=10.0, help="the flood's rate, in that of the quiet one")
    add("--seconds", type=float, default=40.0, help="of each half")
    add("--lead", type=float, default=4.0, help="seconds of flood before measuring begins")
    add("--workers", type=int, default=2)
    add("--rows", type=int, default=6, help="streams that a worker runs at a time")
    add("--step", type=float, default=0.02, help="seconds of a worker's step, at least")
    add("--schedulers", type=int, default=1)
    add("--gateways", type=int, default=1, help="requests go to them in turn")
    add("--bound", type=float, default=1.5, help="on the ratio of the quiet tenant's TTFT p95")
    add_cluster_options(parser)
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace, folder: Path) -> Settings:
    """The bundled model, simulated; keys are the tenants' names."""
    lines = []
    for name in (QUIET, FLOOD):
        digest = hashlib.sha256(name.encode()).hexdigest()
        lines.append(f'[tenants.{name}]\n[[keys]]\nsha256 = "{digest}"\ntenant = "{name}"\n')
    keys_file = folder / "keys.toml"
    keys_file.write_text("\n".join(lines), encoding="utf-8")
    return load_settings(
        None,
        {
            "model": {"max_model_len": 4096},
            "worker": {
                "engine": "sim",
                "sim_step_s": options.step,
                "max_num_seqs": options.rows,
            },
            "gateway": {"keys_file": str(keys_file)},
            "up": {"workers": options.workers, "schedulers": options.schedulers},
        },
    )


def make_entries(rate: float, seconds: float, seed: int, first_id: int) -> list[Entry]:
    """Requests at random times; their prompts have nothing in common. `seed` decides about sizes
    and times, `first_id` about the content."""
    dice, at_s, entries = Random(seed), 0.0, []
    while (at_s := at_s + dice.expovariate(rate)) < seconds:
        length = dice.choice(_PROMPTS)
        blocks = range(first_id, first_id + -(-length // BLOCK_TOKENS))
        entries.append(Entry(1e3 * at_s, length, dice.choice(_OUTPUTS), list(blocks)))
        first_id = blocks.stop
    return entries


def summary(played: Sequence[PlayedRequest], seconds: float) -> dict[str, object]:
    """Milliseconds; errors by kind."""
    good = [each for each in played if each.error is None]
    firsts = sorted(each.first_s for each in good if each.first_s is not None)
    return {
        "requests": len(played),
        "served": len(good),
        "served_per_s": round(len(good) / seconds, 2),
        "errors": dict(Counter(each.error for each in played if each.error is not None)),
        "ttft_p50_ms": round(1e3 * percentile(firsts, 50), 1) if firsts else None,
        "ttft_p95_ms": round(1e3 * percentile(firsts, 95), 1) if firsts else None,
        "late_max_ms": round(1e3 * max((each.late_s for each in played), default=0.0), 1),
    }


async def measure(options: argparse.Namespace, cluster: Cluster) -> dict[str, dict[str, object]]:
    """The quiet tenant alone, then during the flood."""
    vocab_size = json.loads((DEMO_MODEL / "config.json").read_bytes())["vocab_size"]
    prompts, urls = Prompts(vocab_size), cluster.urls
    model = await first_model(Target(urls[0], QUIET))

    async def play(tenant: str, entries: list[Entry]) -> list[PlayedRequest]:
        servers, timeout_s = [Target(url, tenant) for url in urls], _TIMEOUT_S[tenant]
        return await Player(servers, model, prompts, speed=1.0, timeout_s=timeout_s).play(entries)

    seconds, seed = options.seconds, options.seed
    await play(QUIET, make_entries(options.rate, 3.0, seed + 1, 1 << 30))
    alone = await play(QUIET, make_entries(options.rate, seconds, seed, 0))
    length_s = seconds + options.lead
    flood = make_entries(options.rate * options.factor, length_s, seed + 2, 1 << 20)
    flooding = asyncio.create_task(play(FLOOD, flood))
    await asyncio.sleep(options.lead)
    during = await play(QUIET, make_entries(options.rate, seconds, seed, 1 << 10))
    return {
        "alone": summary(alone, seconds),
        "during": summary(during, seconds),
        "flood": summary(await flooding, length_s),
    }


async def run(options: argparse.Namespace) -> dict[str, dict[str, object]]:
    """On a mesh of its own. Raises RuntimeError when it does not start."""
    with private_folder() as folder:
        logs = options.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        settings = settings_of(options, folder)
        cluster = Cluster(settings, folder, logs, num_gateways=options.gateways)
        try:
            await cluster.start()
            return await measure(options, cluster)
        finally:
            await cluster.stop()


def ratio_of(found: dict[str, dict[str, object]]) -> float | None:
    """Return the ratio of the p95; None when a tenant got no answer at all."""
    alone, during = (found[name]["ttft_p95_ms"] for name in ("alone", "during"))
    if not isinstance(alone, float) or not isinstance(during, float):
        return None
    return round(during / alone, 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the ratio is within the bound and no request of the quiet tenant failed."""
    options = parse(arguments)
    found = uvloop.run(run(options))
    ratio = ratio_of(found)
    whole = {"config": vars(options), "environment": environment(), **found, "ratio_p95": ratio}
    if options.out:
        write_json(options.out, whole)
    print(json.dumps(whole, indent=2, default=str))
    is_good = ratio is not None and ratio <= options.bound
    return int(not is_good or bool(found["alone"]["errors"] or found["during"]["errors"]))


if __name__ == "__main__":
    sys.exit(main())
