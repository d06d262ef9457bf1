"""vLLM's routes for operators: sleep and profile workers, load adapters, show settings.

They exist only where `gateway.admin_routes` is on.
"""

import asyncio
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from typing import Annotated, Any, Final, get_args

import msgspec
from fastapi import APIRouter, Depends, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

import tokenmesh
from tokenmesh.services.gateway.core.context import context_of
from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.body import body_schema, read_json
from tokenmesh.services.gateway.core.http.fields import Bounded
from tokenmesh.services.gateway.core.http.sse import json_response
from tokenmesh.services.gateway.core.operations.commands import Admin
from tokenmesh.services.gateway.core.tenancy.auth import require_admin
from tokenmesh.shared.membership import Member
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

LOAD: Final = "/v1/load_lora_adapter"
UNLOAD: Final = "/v1/unload_lora_adapter"
ADAPTERS: Final = "/adapters"


class LoadLoraAdapter(Bounded):
    lora_name: str = Field(min_length=1, description="What requests name as their model.")
    lora_path: str = Field(
        min_length=1, description="A directory on the workers' machines, below those allowed."
    )
    load_inplace: bool = Field(
        default=False, description="Replace the adapter that has this name now."
    )
    model: str | None = Field(
        default=None, description="The base model; required only where there are several."
    )


class UnloadLoraAdapter(Bounded):
    lora_name: str = Field(min_length=1, description="The adapter's name.")
    model: str | None = Field(default=None, description="Its base model.")


class RegisterAdapter(Bounded):
    name: str = Field(min_length=1, description="What requests name as their model.")
    src: str = Field(min_length=1, description="The same as `lora_path`.")


BODIES: Final = (LoadLoraAdapter, UnloadLoraAdapter, RegisterAdapter)


def adapters_router(core: Core) -> APIRouter:
    router = APIRouter(tags=["admin"], dependencies=[Depends(require_admin)])

    @router.post(LOAD, openapi_extra=body_schema(LoadLoraAdapter))
    async def load_lora_adapter(request: Request) -> Response:
        """Load an adapter on every worker of a model; answered when all have it."""
        body = await read_json(request, LoadLoraAdapter, core.settings)
        warnings = await core.adapters.load(
            body.lora_name, body.lora_path, in_place=body.load_inplace, model=body.model
        )
        context_of(request.scope).warnings.extend(warnings)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post(UNLOAD, openapi_extra=body_schema(UnloadLoraAdapter))
    async def unload_lora_adapter(request: Request) -> Response:
        """Take no more requests for an adapter; streams that run go on."""
        body = await read_json(request, UnloadLoraAdapter, core.settings)
        await core.adapters.unload(body.lora_name, body.model)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @router.post(ADAPTERS, openapi_extra=body_schema(RegisterAdapter))
    async def register_adapter(request: Request) -> Response:
        """SageMaker's way to load an adapter."""
        body = await read_json(request, RegisterAdapter, core.settings)
        warnings = await core.adapters.load(body.name, body.src, in_place=False, model=None)
        context_of(request.scope).warnings.extend(warnings)
        return PlainTextResponse(f"Adapter {body.name} registered")

    # An adapter's name may contain slashes.
    @router.delete(f"{ADAPTERS}/{{adapter_name:path}}")
    async def unregister_adapter(adapter_name: str) -> Response:
        """SageMaker's way to unload an adapter."""
        await core.adapters.unload(adapter_name, None)
        return PlainTextResponse(f"Adapter {adapter_name} unregistered")

    return router


_Model = Annotated[
    str | None, Query(description="The workers' model; required only where there are several.")
]
_Level = Annotated[int, Query(ge=1, le=2, description="1: free KV; 2: free the weights as well.")]
_Mode = Annotated[SleepMode, Query(description="End running streams, or wait for them.")]
_Tags = Annotated[list[WakeTag], Query(description="What to restore; default: everything.")]
_ALL_TAGS: Final = list(get_args(WakeTag))
_SECRET: Final = frozenset({"api_key_hashes", "keys_file", "ssl_keyfile"})


def admin_router(core: Core) -> APIRouter:
    router = APIRouter(tags=["admin"], dependencies=[Depends(require_admin)])
    admin = Admin(core.bus, core.members, core.mesh.catalog, core.settings)

    @router.post("/sleep")
    async def sleep(level: _Level = 1, mode: _Mode = "abort", model: _Model = None) -> Response:
        """Free the memory of a model's workers; requests get 503 until they wake."""
        slept = await admin.command(model, Sleep(level=level, mode=mode), Slept)
        await admin.wait_for_levels({worker: answer.level for worker, answer in slept.items()})
        return _by_worker(slept)

    @router.post("/wake_up")
    async def wake_up(tags: _Tags = [], model: _Model = None) -> Response:  # noqa: B006
        """Wake a model's workers; those that are awake stay awake."""
        woken = await admin.command(model, WakeUp(tags=tags or _ALL_TAGS), Woken)
        await admin.wait_for_levels({worker: answer.level for worker, answer in woken.items()})
        return _by_worker(woken)

    @router.get("/is_sleeping")
    async def is_sleeping(model: _Model = None) -> Response:
        """Return whether all workers of a model sleep, and the level of each; 0 is awake."""
        levels = admin.sleep_levels(model)
        workers = [{"worker_id": worker, "level": level} for worker, level in levels.items()]
        return json_response({"is_sleeping": all(levels.values()), "workers": workers})

    @router.post("/start_profile")
    async def start_profile(model: _Model = None) -> Response:
        """Make each worker of a model record a trace, bounded in steps and time."""
        return _by_worker(await admin.command(model, StartProfile(), Done))

    @router.post("/stop_profile")
    async def stop_profile(model: _Model = None) -> Response:
        """End the traces, and return the file of each, also of one that has already ended."""
        return _by_worker(await admin.command(model, StopProfile(), Profiled))

    @router.get("/server_info")
    async def server_info() -> Response:
        """Settings without secrets, versions, and the live processes of the mesh."""
        return json_response(await _server_info(core))

    return router


def _by_worker(answers: Mapping[Any, msgspec.Struct]) -> Response:
    workers = [
        {"worker_id": worker, **msgspec.structs.asdict(answer)}
        for worker, answer in answers.items()
    ]
    return json_response({"workers": workers})


async def _server_info(core: Core) -> dict[str, Any]:
    return {
        "version": tokenmesh.__version__,
        "gateway_id": core.id,
        "settings": core.settings.model_dump(mode="json", exclude=set(_SECRET)),
        "members": [_member(member) for member in core.members.all()],
        # In a thread: it reads hundreds of small files.
        "system": await asyncio.to_thread(_system),
    }


def _member(member: Member) -> dict[str, Any]:
    beat = member.beat
    return {
        "service": beat.service,
        "id": beat.instance_id,
        "version": beat.version,
        "epoch": beat.epoch,
        "draining": beat.draining,
        "models": [card.name for card in beat.models],
    }


def _system() -> dict[str, Any]:
    packages = {each.metadata["Name"]: each.version for each in distributions()}
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": dict(sorted(packages.items())),
    }
