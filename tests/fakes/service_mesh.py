"""One service's actors in this process, on the test's real NATS and Redis."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager

from tokenmesh.shared.bus.message_bus import connect
from tokenmesh.shared.config import Settings
from tokenmesh.shared.ids import new_instance_id
from tokenmesh.shared.metrics import Metrics
from tokenmesh.shared.redis import open_redis
from tokenmesh.shared.service import Mesh
from tokenmesh.shared.service.run import ProcessControl
from tokenmesh.shared.subjects import process_control


@asynccontextmanager
async def running(
    service: str, settings: Settings, build: Callable[[Mesh], Coroutine[object, object, None]]
) -> AsyncIterator[Mesh]:
    """Do what run_service does, without signals and telemetry."""
    instance_id = new_instance_id(service)
    async with AsyncExitStack() as stack:
        metrics = Metrics(settings.telemetry.metrics_prefix)
        bus = await connect(
            settings.bus,
            instance_id,
            on_problem=lambda kind: metrics.counter("bus_complaints", kind=kind).inc(),
        )
        stack.push_async_callback(bus.close)
        redis = open_redis(settings.redis)
        stack.push_async_callback(redis.close)
        mesh = Mesh(service, instance_id, settings, bus, redis, metrics)
        stack.push_async_callback(mesh.leave)
        await mesh.start()
        await build(mesh)
        control = ProcessControl(lambda: None, mesh.metrics)
        await mesh.listen(control, process_control(instance_id))
        await mesh.join()
        yield mesh
