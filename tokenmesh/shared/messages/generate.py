"""Messages to one worker: start a stream, control it, request lost tokens."""

import msgspec

from tokenmesh.shared.ids import GatewayId, ModelName, RequestId, WorkerId
from tokenmesh.shared.messages.media import MediaItem
from tokenmesh.shared.messages.place import KvOrigin
from tokenmesh.shared.messages.sampling import SamplingParams


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Start one stream (one choice). Answered at once: Accepted, Refused or Failed.

    A repeated Generate with the same (gateway, stream, attempt) is accepted and does nothing.
    """

    request_id: RequestId
    model: ModelName
    gateway: GatewayId
    """Tokens go to this gateway's subject."""
    stream: int
    """The gateway's number for the stream, unique within that gateway process."""
    epoch: int
    """Epoch of the worker that the scheduler chose."""
    attempt: int = 0
    """Higher attempts of a stream replace lower ones everywhere."""
    prompt_ids: bytes
    output_ids: bytes = b""
    """Tokens that an earlier attempt already delivered; generation goes on after them."""
    sampling: SamplingParams
    media: list[MediaItem] = []
    priority: int = 0
    cache_salt: str | None = None
    lora: str | None = None
    route_head: bytes = b""
    """As the tokenizer gave it; empty: the stream's blocks are not in the prefix index."""
    reservation: str = ""
    """The reservation of the placement: given back at the first token."""
    tenant: str = ""
    """Whose share of the worker it takes."""
    weight: float = 1.0
    """The tenant's share; its readers bound it."""
    tenant_priority: int = 0
    """The tenant's class, before `priority`; smaller is sooner."""
    lora_hash: str = ""
    """The content that `lora` must have; empty: any."""
    keep_alive_s: float | None = None
    """From now on a model on demand sleeps after so long without requests; negative: never."""
    prediction_ids: bytes = b""
    """The output may be close to it, from its beginning; no token depends on it."""
    kv: KvOrigin | None = None
    """As the scheduler answered."""


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The stream is in the worker's queue."""

    worker_id: WorkerId


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Stop a stream and free its blocks. Answered with Done, also when it has already ended."""

    gateway: GatewayId
    stream: int
    attempt: int


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """To all gateways: end these requests of a tenant, wherever they run. Not answered."""

    tenant: str
    request_ids: list[RequestId]


class Resend(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Publish a stream's output again from `offset` on. Answered with Done or StreamUnknown."""

    gateway: GatewayId
    stream: int
    attempt: int
    offset: int


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Check that a worker, or any process, responds. Answered with Done by its event loop."""


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Take no new streams, finish the running ones, leave."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The command was carried out."""


class StreamUnknown(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The worker holds nothing of this stream (any more): start it again elsewhere."""
