"""What others noticed of an attack, and whether that is too much."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True)
class Score:
    """Of one attack, compared with the phase without one."""

    name: str
    livez_p99_s: float
    longest_gap_s: float
    long_gaps: int
    long_gaps_without: int
    growth: float
    grown: str
    """The process that grew most."""
    num_errors: int
    answered: int

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


def score(name: str, quiet: Noticed, attacked: Noticed, answered: int) -> Score:
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
        num_errors=attacked.num_errors,
        answered=answered,
    )


def table(scores: Sequence[Score]) -> str:
    """One line an attack."""
    head = f"{'attack':32} {'answered':>8} {'livez p99':>10} {'gap max':>9} {'growth':>7}  result"
    return "\n".join([head, *(_line(each) for each in scores)])


def _line(each: Score) -> str:
    result = "; ".join(each.failures()) or "ok"
    return (
        f"{each.name:32} {each.answered:8} {1e3 * each.livez_p99_s:7.0f} ms "
        f"{1e3 * each.longest_gap_s:6.0f} ms {each.growth:6.2f}x  {result}"
    )
