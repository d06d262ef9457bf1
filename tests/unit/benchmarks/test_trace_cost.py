"""What tracing costs: CPU by service, replicas together."""

from benchmarks.serve.memory import Trail
from benchmarks.trace_cost import used_s


def test_replicas_are_counted_together() -> None:
    trails = [
        Trail(1, "tokenmesh serve worker", cpu_s=[1.0, 2.0, 3.5]),
        Trail(2, "tokenmesh serve worker", cpu_s=[0.0, 4.0]),
        Trail(3, "nats-server", cpu_s=[0.5, 0.75]),
    ]
    assert used_s(trails) == {"tokenmesh serve worker": 6.5, "nats-server": 0.25}
