"""A gateway that is left running is blamed on the test that began it."""

from tests.left_gateways import LeftGateways


class Forever:
    def __await__(self):  # type: ignore[no-untyped-def]
        yield


async def run(_core: object) -> None:
    await Forever()


def test_a_gateway_that_is_collected_while_it_runs_names_its_test() -> None:
    left = LeftGateways()
    running = left._watched(run)(None)
    running.send(None)
    assert left.pop_left(is_module_over=False) == []
    running.close()
    (name,) = left.pop_left(is_module_over=False)
    assert "test_a_gateway_that_is_collected" in name


def test_a_gateway_may_run_until_its_module_is_over() -> None:
    left = LeftGateways()
    running = left._watched(run)(None)
    running.send(None)
    assert left.pop_left(is_module_over=False) == []
    assert len(left.pop_left(is_module_over=True)) == 1
    running.close()
