"""Tell whether a gateway can serve requests, as probes of load balancers ask."""

from typing import Final

from starlette.responses import Response

from tokenmesh.services.gateway.core.gateway_core import Core
from tokenmesh.services.gateway.core.http.sse import json_response
from tokenmesh.services.gateway.core.mesh.catalog import ENCODER

_NEEDED: Final[tuple[str, ...]] = ("tokenizer", "scheduler", "worker")
_RENDER_NEEDED: Final = ("tokenizer",)
_TOKENS_NEEDED: Final = ("scheduler", "worker")


def readiness(core: Core) -> Response:
    """200 while requests can be served, else 503 and why."""
    needed, settings = _NEEDED, core.settings
    if settings.render_only or settings.tokens_only:
        needed = _RENDER_NEEDED if settings.render_only else _TOKENS_NEEDED
    missing = [service for service in needed if not core.members.service(service)]
    if "worker" in needed and _lacks_encoder(core):
        missing.append(ENCODER)
    if core.draining.is_set():
        return json_response({"ready": False, "draining": True}, 503)
    if missing:
        return json_response({"ready": False, "missing": missing}, 503)
    if "worker" in needed and not any(
        member.takes_requests for member in core.members.service("worker")
    ):
        return json_response({"ready": False, "asleep": True}, 503)
    return json_response({"ready": True, "gateway": core.id})


def _lacks_encoder(core: Core) -> bool:
    """Return whether no model can be served in full, because no encoder is alive."""
    models = core.mesh.catalog.all()
    needs_one = bool(models) and all(card.needs_encoder for card in models)
    return needs_one and not core.members.service(ENCODER)
