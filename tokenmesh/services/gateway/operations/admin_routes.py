"""POST /sleep, /wake_up, /start_profile, /stop_profile; GET /is_sleeping: vLLM's, for operators."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, get_args

import msgspec
from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from tokenmesh.services.gateway.errors import json_response
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.tenancy.auth import require_admin
from tokenmesh.shared.messages import (
    Done,
    Profiled,
    Sleep,
    Slept,
    StartProfile,
    StopProfile,
    WakeUp,
    Woken,
)
from tokenmesh.shared.messages.control import SleepMode, WakeTag

_Model = Annotated[
    str | None, Query(description="Whose workers; needed only where there are several models.")
]
_Level = Annotated[int, Query(ge=1, le=2, description="1: free KV; 2: free the weights as well.")]
_Mode = Annotated[SleepMode, Query(description="End running streams, or wait for them.")]
_Tags = Annotated[list[WakeTag], Query(description="What to bring back; default: everything.")]
_ALL_TAGS: Final = list(get_args(WakeTag))


def admin_router(gateway: Gateway) -> APIRouter:
    """The routes; they exist only where `gateway.admin_routes` is on."""
    router = APIRouter(tags=["admin"], dependencies=[Depends(require_admin)])
    admin = gateway.admin

    @router.post("/sleep")
    async def sleep(level: _Level = 1, mode: _Mode = "abort", model: _Model = None) -> Response:
        """Free the memory of a model's workers; requests are answered with 503 until they wake."""
        slept = await admin.tell(model, Sleep(level=level, mode=mode), Slept)
        await admin.until_seen({worker: answer.level for worker, answer in slept.items()})
        return _by_worker(slept)

    @router.post("/wake_up")
    async def wake_up(tags: _Tags = [], model: _Model = None) -> Response:  # noqa: B006
        """Bring a model's workers back; those that are awake stay so."""
        woken = await admin.tell(model, WakeUp(tags=tags or _ALL_TAGS), Woken)
        await admin.until_seen({worker: answer.level for worker, answer in woken.items()})
        return _by_worker(woken)

    @router.get("/is_sleeping")
    async def is_sleeping(model: _Model = None) -> Response:
        """Whether no worker of a model is awake, and the level of each; 0 is awake."""
        levels = admin.sleep_levels(model)
        workers = [{"worker_id": worker, "level": level} for worker, level in levels.items()]
        return json_response({"is_sleeping": all(levels.values()), "workers": workers})

    @router.post("/start_profile")
    async def start_profile(model: _Model = None) -> Response:
        """Let each worker of a model record a trace, bounded in steps and time."""
        return _by_worker(await admin.tell(model, StartProfile(), Done))

    @router.post("/stop_profile")
    async def stop_profile(model: _Model = None) -> Response:
        """End the traces; where each was written, also one that has ended by itself."""
        return _by_worker(await admin.tell(model, StopProfile(), Profiled))

    return router


def _by_worker(answers: Mapping[Any, msgspec.Struct]) -> Response:
    workers = [
        {"worker_id": worker, **msgspec.structs.asdict(answer)}
        for worker, answer in answers.items()
    ]
    return json_response({"workers": workers})
