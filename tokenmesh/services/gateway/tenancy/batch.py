"""UsageBatch: what has ended for one tenant since the last time that Redis was told."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenmesh.services.gateway.tenancy.tenant import Tenant


@dataclass(slots=True)
class TokenCounts:
    """Of one model."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    """Of the prompt, found in a prefix cache."""
    completion: int = 0

    @property
    def charged(self) -> int:
        """What counts against limits."""
        return self.prompt + self.completion

    def add(self, other: "TokenCounts") -> None:
        """Sum up."""
        self.requests += other.requests
        self.prompt += other.prompt
        self.cached += other.cached
        self.completion += other.completion


@dataclass(slots=True)
class UsageBatch:
    """Of one tenant and one month."""

    tenant: Tenant
    month: str
    leases: list[str] = field(default_factory=list)
    models: dict[str, TokenCounts] = field(default_factory=dict)
    named: dict[str, tuple[str, TokenCounts]] = field(default_factory=dict)
    """Model and tokens of responses that another gateway may count as well, by their ids."""

    @property
    def charged(self) -> int:
        """Tokens of all."""
        of_names = (tokens.charged for _, tokens in self.named.values())
        return sum(tokens.charged for tokens in self.models.values()) + sum(of_names)

    def arguments(
        self, number: int, max_models: int, kept_s: int, names_s: float
    ) -> Iterator[str | int | float]:
        """Of settle.lua."""
        yield from (number, self.tenant.requests_per_minute or 0)
        yield from (self.tenant.tokens_per_minute or 0, max_models, kept_s, names_s)
        yield len(self.leases)
        yield from self.leases
        entries = [("", *each) for each in self.models.items()]
        entries += [(name, *each) for name, each in self.named.items()]
        for name, model, tokens in entries:
            yield from (name, model, tokens.requests)
            yield from (tokens.prompt, tokens.cached, tokens.completion)
