"""RealtimeServices: what sessions work with."""

from dataclasses import dataclass

from tokenmesh.services.gateway.apis.audio.service import Transcriptions
from tokenmesh.services.gateway.apis.openai.request_builder import RequestBuilder
from tokenmesh.services.gateway.core.gateway_core import Core


@dataclass(frozen=True, slots=True)
class RealtimeServices:
    """Those of one gateway, shared by its sessions."""

    core: Core
    builder: RequestBuilder
    transcriptions: Transcriptions
