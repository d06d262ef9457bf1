"""Judges what others noticed of an attack."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

LIVEZ_S: Final = 0.25
GAP_S: Final = 0.5
GROWTH: Final = 1.5


@dataclass(frozen=True, slots=True)
class Noticed:
    """In one phase."""

    livez_s: Sequence[float]
    gaps_s: Sequence[float]
    """Between chunks of the innocent streams."""
    rss_mib: Mapping[str, float]
    """The most of each process."""
    num_errors: int = 0
    """Probes or innocent streams that failed."""
    loop_lag_p99_s: float = 0.0
    """The 99th percentile of the gateway's event loop, by its own metric: a bucket's upper
    bound."""
    cores: Mapping[str, float] = field(default_factory=dict)
    """In use on average, by each process and by the whole machine."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each second in which a process was ready to run and had no core."""


@dataclass(frozen=True, slots=True)
class Score:
    """The result of one attack, compared with the phase without one."""

    name: str
    livez_p99_s: float
    longest_gap_s: float
    long_gaps: int
    long_gaps_without: int
    growth: float
    grown: str
    """The process that grew most."""
    growths: Mapping[str, float]
    """The growth of every process."""
    num_errors: int
    answered: int
    loop_lag_p99_s: float
    cores: Mapping[str, float]
    waits: Mapping[str, float]

    def failures(self) -> list[str]:
        """The bars that it does not hold."""
        held = {
            f"livez p99 {self.livez_p99_s:.3f} s": self.livez_p99_s <= LIVEZ_S,
            f"{self.long_gaps} gaps over {GAP_S} s": self.long_gaps <= self.long_gaps_without,
            f"{self.grown} grew {self.growth:.2f}x": self.growth <= GROWTH,
            f"{self.num_errors} errors": self.num_errors == 0,
        }
        return [what for what, is_held in held.items() if not is_held]

    def as_json(self) -> dict[str, object]:
        """For the report."""
        return {**asdict(self), "failures": self.failures()}


def p99(values: Sequence[float]) -> float:
    """0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0


def score(
    name: str, quiet: Noticed, attacked: Noticed, answered: int, attacker_cores: float = 0.0
) -> Score:
    """Compare a phase with the one without an attack."""
    growths = {
        process: mib / quiet.rss_mib[process]
        for process, mib in attacked.rss_mib.items()
        if quiet.rss_mib.get(process)
    }
    grown = max(growths, key=lambda each: growths[each], default="")
    return Score(
        name=name,
        livez_p99_s=p99(attacked.livez_s),
        longest_gap_s=max(attacked.gaps_s, default=0.0),
        long_gaps=sum(gap > GAP_S for gap in attacked.gaps_s),
        long_gaps_without=sum(gap > GAP_S for gap in quiet.gaps_s),
        growth=growths.get(grown, 0.0),
        grown=grown,
        growths={process: round(times, 3) for process, times in growths.items()},
        num_errors=attacked.num_errors,
        answered=answered,
        loop_lag_p99_s=attacked.loop_lag_p99_s,
        cores={**attacked.cores, "attacker": round(attacker_cores, 3)},
        waits=attacked.waits,
    )


def table(scores: Sequence[Score]) -> str:
    """One line an attack; `busy`: cores of the whole machine in use, `waits`: the gateway's."""
    head = f"{'attack':32} {'answered':>8} {'livez p99':>10} {'gap max':>9} {'loop lag':>9}"
    return "\n".join(
        [
            f"{head} {'growth':>7} {'busy':>5} {'waits':>6}  result",
            *(_line(each) for each in scores),
        ]
    )


def _line(each: Score) -> str:
    result = "; ".join(each.failures()) or "ok"
    waits = max((waits for name, waits in each.waits.items() if "gateway" in name), default=0.0)
    return (
        f"{each.name:32} {each.answered:8} {1e3 * each.livez_p99_s:7.0f} ms "
        f"{1e3 * each.longest_gap_s:6.0f} ms {1e3 * each.loop_lag_p99_s:6.0f} ms "
        f"{each.growth:6.2f}x {each.cores.get('whole machine', 0.0):5.2f} {100 * waits:4.0f} %  "
        f"{result}"
    )
