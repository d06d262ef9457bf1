"""Every NATS subject of the mesh; `subject_table.py` lists what they carry, and no other module
writes one.

A model name may hold dots, slashes or spaces, which a NATS token must not: `slug` maps it to one
token and appends a short hash when it replaced a character.
"""

import re
from typing import Final

import xxhash

from tokenmesh.shared.ids import GatewayId, InstanceId, ModelName, ResponseId, WorkerId
from tokenmesh.shared.services import SERVICES

PREFIX: Final = "tm"

RESPONSES: Final = f"{PREFIX}.response.>"
"""All that the journal of responses holds."""
FILES: Final = f"{PREFIX}.file.>"
"""All that the journal of uploads holds."""
BATCHES: Final = f"{PREFIX}.batch.>"
"""All that the journal of batches holds."""
ALL_BEATS: Final = f"{PREFIX}.beat.>"
ALL_BLOCK_EVENTS: Final = f"{PREFIX}.kv.>"
ALL_SPANS: Final = f"{PREFIX}.span.>"

_SERVICE_BY_VERB: Final = {spec.verb: spec.name for spec in SERVICES if spec.verb}

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]")


def slug(model: ModelName) -> str:
    """One NATS token for a model name; equal names give equal tokens."""
    safe = _UNSAFE.sub("-", model)
    return safe if safe == model else f"{safe}-{xxhash.xxh32_hexdigest(model.encode())}"


def tokenize(model: ModelName) -> str:
    """Tokenize, Detokenize, Describe for one model."""
    return f"{PREFIX}.tokenize.{slug(model)}"


def encode(model: ModelName) -> str:
    """Encode for one model."""
    return f"{PREFIX}.encode.{slug(model)}"


def place(model: ModelName) -> str:
    """Place for one model; schedulers listen on `place_any`."""
    return f"{PREFIX}.place.{slug(model)}"


def place_any() -> str:
    """Wildcard over every model: a scheduler places for all of them."""
    return f"{PREFIX}.place.*"


def service_of(subject: str) -> str:
    """Whose processes answer on `tokenize`, `encode` or `place`."""
    return _SERVICE_BY_VERB[subject.split(".")[1]]


def replica(subject: str, instance: InstanceId) -> str:
    """The same requests, for one instance instead of any of its queue group."""
    return f"{subject}.{instance}"


def worker_generate(worker: WorkerId) -> str:
    """Generate for one worker; answered at once with Accepted, Refused or Failed."""
    return f"{PREFIX}.worker.{worker}.generate"


def worker_control(worker: WorkerId) -> str:
    """Cancel, Resend, Ping, Drain, Sleep, WakeUp, StartProfile, StopProfile for one worker."""
    return f"{PREFIX}.worker.{worker}.control"


def worker_adapters(worker: WorkerId) -> str:
    """LoadAdapter and UnloadAdapter for one worker."""
    return f"{PREFIX}.worker.{worker}.adapters"


def worker_blocks(worker: WorkerId) -> str:
    """ReplayBlockEvents and ReadBlocks for one worker."""
    return f"{PREFIX}.worker.{worker}.blocks"


def worker_kv(worker: WorkerId) -> str:
    """PrefillKv, PollKv and ReleaseKv of other workers for one worker."""
    return f"{PREFIX}.worker.{worker}.kv"


def block_events(model: ModelName, worker: WorkerId) -> str:
    """Where a worker publishes BlockEvents and BlocksHeld."""
    return f"{PREFIX}.kv.{slug(model)}.{worker}"


def process_control(instance: InstanceId) -> str:
    """Drain, Ping and ReadMetrics for one process of any service."""
    return f"{PREFIX}.process.{instance}.control"


def gateway_tokens(gateway: GatewayId) -> str:
    """Where workers publish Tokens for one gateway."""
    return f"{PREFIX}.gateway.{gateway}.tokens"


def gateway_prompts(gateway: GatewayId) -> str:
    """ReadPrompt for one gateway."""
    return f"{PREFIX}.gateway.{gateway}.prompts"


def aborts() -> str:
    """Carries the ids of requests that clients abort to all gateways."""
    return f"{PREFIX}.abort"


def response_log(response: ResponseId) -> str:
    """The journal of one response."""
    return f"{PREFIX}.response.log.{response}"


def conversation_log(conversation_id: str) -> str:
    """The journal of one conversation; only its last entry counts."""
    return f"{PREFIX}.response.conversation.{conversation_id}"


def response_open(owner: str, response: str) -> str:
    """One entry while a gateway works on a response; both may be wildcards."""
    return f"{PREFIX}.response.open.{owner}.{response}"


def file_content(part: str, file_id: str) -> str:
    """The content of an upload; `part` is one of few, so that all can be listed by parts."""
    return f"{PREFIX}.file.{part}.{file_id}"


def batch_log(tenant: str, batch_id: str) -> str:
    """The journal of one batch; `tenant` is one token for its name. Both may be wildcards."""
    return f"{PREFIX}.batch.log.{tenant}.{batch_id}"


def batch_cancel(batch_id: str) -> str:
    """One entry once the batch is to be cancelled."""
    return f"{PREFIX}.batch.cancel.{batch_id}"


def batch_open(owner: str, batch_id: str) -> str:
    """One entry while a gateway works on a batch; both may be wildcards."""
    return f"{PREFIX}.batch.open.{owner}.{batch_id}"


def response_cancels(gateway: GatewayId) -> str:
    """Ids of responses and batches that a gateway should end."""
    return f"{PREFIX}.gateway.{gateway}.cancels"


def beat(service: str, instance: InstanceId) -> str:
    """Where one instance publishes its heartbeat."""
    return f"{PREFIX}.beat.{service}.{instance}"


def micro(verb: str, service: str | None = None, instance: InstanceId | None = None) -> str:
    """A subject of the NATS micro protocol: of all services, one service, or one instance."""
    return ".".join(("$SRV", verb, *(part for part in (service, instance) if part is not None)))


def spans(service: str) -> str:
    """Where a service publishes finished spans (OTLP protobuf)."""
    return f"{PREFIX}.span.{service}"
