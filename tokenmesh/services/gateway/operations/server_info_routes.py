"""GET /server_info: what this gateway is told and whom it sees, for operators."""

import asyncio
import platform
import sys
from importlib.metadata import distributions
from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

import tokenmesh
from tokenmesh.services.gateway.errors import json_response
from tokenmesh.services.gateway.gateway import Gateway
from tokenmesh.services.gateway.tenancy.auth import require_admin
from tokenmesh.shared.membership import Member

_HIDDEN = frozenset({"api_key_hashes", "keys_file", "ssl_keyfile"})


def server_info_router(gateway: Gateway) -> APIRouter:
    """The route; it exists only where `gateway.admin_routes` is on."""
    router = APIRouter(tags=["admin"], dependencies=[Depends(require_admin)])

    @router.get("/server_info")
    async def server_info() -> Response:
        """Settings without secrets, versions, and the live processes of the mesh."""
        return json_response(
            {
                "version": tokenmesh.__version__,
                "gateway_id": gateway.id,
                "settings": gateway.settings.model_dump(mode="json", exclude=set(_HIDDEN)),
                "members": [_member(member) for member in gateway.members.all()],
                # Hundreds of small files.
                "system": await asyncio.to_thread(_system),
            }
        )

    return router


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
