"""A tenant that floods the mesh waits behind itself: real gateway, scheduler and sim worker."""

import asyncio
import secrets
from pathlib import Path

from tests.fakes.key_file import key_entry
from tests.fakes.small_mesh import SmallMesh
from tokenmesh.shared.config.mesh import BusSettings, RedisSettings

NUM_FLOOD = 60


async def test_a_quiet_tenant_is_served_long_before_the_flood_is_over(
    bus_settings: BusSettings, redis_settings: RedisSettings, tmp_path: Path
) -> None:
    mark = secrets.token_hex(4)
    names = (f"flood-{mark}", f"quiet-{mark}")
    lines = [f"[tenants.{name}]\n{key_entry(name, name)}" for name in names]
    path = tmp_path / "keys.toml"
    path.write_text("\n".join(lines))
    async with SmallMesh(
        tmp_path,
        bus_settings,
        redis_settings,
        worker={"sim_step_s": 0.01, "max_num_seqs": 2},
        gateway={"keys_file": str(path)},
        headers={"authorization": f"Bearer quiet-{mark}"},
    ) as mesh:
        done: list[str] = []

        async def ask(name: str) -> None:
            body = {"model": mesh.model, "prompt": "Hi", "max_tokens": 8, "ignore_eos": True}
            headers = {"authorization": f"Bearer {name}-{mark}"}
            response = await mesh.client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200
            done.append(name)

        flood = [asyncio.create_task(ask("flood")) for _ in range(NUM_FLOOD)]
        await mesh.until(lambda: len(done) >= 2)
        await ask("quiet")
        # Only what was placed before it, and what takes turns with it, comes first.
        assert done.index("quiet") < NUM_FLOOD // 2
        await asyncio.gather(*flood)
