"""worker_svc as a process of its own: it starts without torch and leaves when it is stopped."""

import asyncio
import json
import sys
from pathlib import Path

from tokenmesh.shared import subjects
from tokenmesh.shared.bus.base import Envelope
from tokenmesh.shared.bus.message_bus import MessageBus
from tokenmesh.shared.clock import now_s
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings
from tokenmesh.shared.ids import ModelName, WorkerId
from tokenmesh.shared.messages import Done, Drain, Heartbeat

MODEL = ModelName("process-of-test")


def write_config(directory: Path, bus: BusSettings, redis: RedisSettings) -> Path:
    """A TOML file with the settings of a simulated worker."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 500,
        "max_position_embeddings": 512,
    }
    (directory / "config.json").write_text(json.dumps(config))
    assert bus.password is not None
    assert redis.password is not None
    path = directory / "tokenmesh.toml"
    path.write_text(
        f"""
[[models]]
model = "{directory}"
served_model_name = ["{MODEL}"]
[bus]
url = "{bus.url}"
user = "{bus.user}"
password = "{bus.password.get_secret_value()}"
[redis]
url = "{redis.url}"
password = "{redis.password.get_secret_value()}"
[worker]
engine = "sim"
"""
    )
    return path


def mapped_files(pid: int) -> str:
    """Libraries that a process has loaded, among much else."""
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


async def test_a_simulated_worker_has_no_torch_and_leaves_after_drain(
    tmp_path: Path, bus: MessageBus, bus_settings: BusSettings, redis_settings: RedisSettings
) -> None:
    config = write_config(tmp_path, bus_settings, redis_settings)
    found: asyncio.Future[WorkerId] = asyncio.get_running_loop().create_future()

    async def see(envelope: Envelope) -> None:
        assert isinstance(envelope.message, Heartbeat)
        names = [card.name for card in envelope.message.models]
        if names == [MODEL] and not found.done():
            found.set_result(WorkerId(envelope.message.instance_id))

    subscription = await bus.subscribe(subjects.ALL_BEATS, see)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tokenmesh", "serve", "worker", "--config", str(config)
    )
    try:
        async with asyncio.timeout(15):
            worker_id = await found
            assert "libtorch" not in mapped_files(process.pid)
            control = subjects.worker_control(worker_id)
            assert await bus.request(control, Drain(), deadline_s=now_s() + 5) == Done()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await subscription.stop()
