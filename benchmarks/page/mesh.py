"""The sections of what the mesh's programs write: faults, fairness, placement of a trace."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from benchmarks.chaos_run.gaps import MAX_GUIDED_RATIO
from benchmarks.page.table import number, origin, table

Result = Mapping[str, Any]

_FAULTS: Final = {"kill": "worker killed (SIGKILL)", "freeze": "worker stopped (SIGSTOP)"}
_POLICIES: Final = {
    "estimated_ttft": "estimated time to first token (the default)",
    "prefix_hash": "hash of the prompt's beginning",
    "least_tokens": "fewest tokens queued",
    "round_robin": "round robin",
}


def recovery_section(result: Result) -> Iterator[str]:
    """The silence of a stream whose worker fails."""
    config = result["config"]
    yield "## Silence of a stream whose worker fails"
    yield ""
    yield origin(result["environment"], None)
    yield (
        f"One fault at a time on a mesh of {config['workers']} `sim` workers with steps of "
        f"{config['step'] * 1e3:.0f} ms, {config['concurrency']} streams; every stream is checked "
        "token for token. Without the prefill on the new worker. "
        "`python -m benchmarks.bench_recovery`."
    )
    yield ""
    rows = (
        [
            _FAULTS[kind],
            str(found["count"]),
            number(found["p50_ms"]),
            number(found["p99_ms"]),
            number(1e3 * result["bounds_s"][kind], 0),
            _held(found["p99_ms"] <= 1e3 * result["bounds_s"][kind]),
        ]
        for kind, found in result["silence_less_prefill"].items()
    )
    yield from table(["silence, ms", "streams", "p50", "p99", "bar at p99", "holds"], rows)
    yield ""
    yield f"Of {result['requests']:,} requests {_count(result['failures'])} failed."


def chaos_section(result: Result) -> Iterator[str]:
    """Random faults, and what was wrong afterwards."""
    yield "## Random faults"
    yield ""
    yield origin(result["environment"], None)
    yield (
        f"{result['faults']} faults in {result['seconds']:.0f} s: services, NATS and Redis killed, "
        "stopped or terminated, several at a time. Plain streams, chats with recorded answers and "
        "stored responses, checked token for token; tenants' usage against what clients received. "
        "`python -m benchmarks.chaos`."
    )
    yield ""
    rows = [
        ["streams", number(result["streams"], 0)],
        ["tokens", number(result["tokens"], 0)],
        ["streams that failed or were wrong", _count(result["failures"])],
        ["blocks, reservations, processes or files left", str(len(result["leaks"]))],
        ["differences in what tenants were charged", str(len(result["account_differences"]))],
    ]
    yield from table(["", "number"], rows)


def guided_chaos_section(result: Result) -> Iterator[str]:
    """Random faults with the own engine: silences of streams with a grammar and of plain ones."""
    config = result["config"]
    yield "## Random faults to streams with grammars"
    yield ""
    yield origin(result["environment"], None)
    yield (
        f"{result['faults']} faults in {result['seconds']:.0f} s to {config['workers']} workers "
        f"with a small model, {config['concurrency']} requests at a time, "
        f"{number(result['streams'], 0)} streams: {_count(result['failures'])} failed or were "
        f"wrong; {len(result['leaks'])} blocks, reservations, processes or files left, "
        f"{len(result['account_differences'])} differences in what tenants were charged. Bar: "
        f"{MAX_GUIDED_RATIO:g} times the p99 of plain streams for those with a grammar. "
        "`python -m benchmarks.chaos --engine torch`."
    )
    yield ""
    rows = (
        [kind, *(number(gaps[name], 0) for name in ("count", "p50_ms", "p99_ms", "max_ms"))]
        for kind, gaps in result["longest_gaps"].items()
    )
    yield from table(["longest gap of a stream, ms", "streams", "p50", "p99", "max"], rows)
    yield ""
    ratio = result["guided_ratio"]
    if ratio is None:
        yield "Too few streams of a kind for a ratio."
        return
    reached = _held(ratio <= MAX_GUIDED_RATIO)
    yield f"Ratio at p99: {number(ratio, 2)}; holds: {reached}."


def fairness_section(result: Result) -> Iterator[str]:
    """A tenant alone, and next to one that floods."""
    config = result["config"]
    yield "## A tenant next to a flood"
    yield ""
    yield origin(result["environment"], None)
    yield (
        f"{config['rate']:g} requests a second of one tenant; another one sends "
        f"{config['factor']:g} times as many, more than the {config['workers']} `sim` workers can "
        f"serve. Bar: {config['bound']:g} times the TTFT of being alone at p95. "
        "`python -m benchmarks.bench_fairness`."
    )
    yield ""
    rows = (
        [name, *(number(result[name][f"ttft_{point}_ms"], 0) for point in ("p50", "p95"))]
        for name in ("alone", "during")
    )
    yield from table(["time to first token, ms", "p50", "p95"], rows)
    yield ""
    reached = _held(result["ratio_p95"] <= config["bound"])
    yield f"Ratio at p95: {number(result['ratio_p95'], 2)}; holds: {reached}."


def prefill_apart_section(result: Result) -> Iterator[str]:
    """Streams that decode while long prompts arrive."""
    config, found = result["config"], result["gaps"]
    yield "## Prefill apart from decode"
    yield ""
    yield origin(result["environment"], None)
    yield (
        f"{config['streams']} streams decode while {config['rate']:g} new prompts of "
        f"{config['prompt']:,} tokens arrive a second; two `sim` workers of "
        f"{config['prefill_speed']:,.0f} prompt tokens a second and {config['step']:g} s a step. "
        f"Bar: {config['bound']:g} times the gaps at p99 of no prompts. "
        "`python -m benchmarks.bench_prefill_apart`."
    )
    yield ""
    heads = ["gaps of streams, ms", "p50", "p99", "first token of a prompt, p50"]
    rows = (
        [name, *(number(each[key], 0) for key in ("p50_ms", "p99_ms", "prompt_p50_ms"))]
        for name, each in found.items()
    )
    yield from table(heads, rows)
    yield ""
    ratios = result["ratios_p99"]
    apart = ratios["prefill apart"]
    yield (
        f"Ratio at p99: {number(apart, 2)}, of ordinary workers "
        f"{number(ratios['ordinary workers'], 2)}; holds: {_held(apart <= config['bound'])}."
    )


def replay_section(result: Result) -> Iterator[str]:
    """Policies of placement on a trace of conversations."""
    config = result["config"]
    requests = max(found["requests"] for found in result["policies"].values())
    yield "## Placement of real conversations"
    yield ""
    yield origin(result["environment"], None)
    yield (
        f"{requests:,} requests of Mooncake's conversation trace at {config['rate']:g} times its "
        f"rate, prefill only, on real services with {config['workers']} `sim` workers of "
        f"{config['prefill_rate']:,.0f} tokens/s. `python -m benchmarks.replay`."
    )
    yield ""
    bound = f"under {config['bound']:g} s"
    found = ((title, result["policies"].get(name)) for name, title in _POLICIES.items())
    rows = (
        [
            title,
            f"{each['under_bound']:.1%}",
            f"{each['hit_rate']:.1%}",
            number(each["ttft_p50"]),
            number(each["ttft_p99"]),
        ]
        for title, each in found
        if each is not None
    )
    heads = ["policy", bound, "prompt tokens cached", "TTFT p50, s", "TTFT p99, s"]
    yield from table(heads, rows)


def _count(failures: Mapping[str, int]) -> str:
    return str(sum(failures.values())) if failures else "none"


def _held(is_held: bool) -> str:
    return "yes" if is_held else "**no**"
