"""The table of NATS subjects: what each carries, its senders and its receivers.

The reference and the rights of services (`rights.py`) are made from it.
"""

from dataclasses import dataclass
from typing import Final

from tokenmesh.shared.services import SERVICES


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One row. `<name>` stands for one token.

    `rights.py` makes the permissions of each service from `senders` and `receivers`.
    """

    pattern: str
    listeners: str
    """For the reference, in words."""
    carries: str
    """Messages, each with its answers."""
    senders: tuple[str, ...]
    """Users that publish: services, and those of `rights.USERS`."""
    receivers: tuple[str, ...] = ()
    """Users that subscribe; `rights.py` adds heartbeats, spans and the micro protocol."""
    queue: str = ""
    """Name of the queue group: one of its members gets each message."""
    is_ours: bool = True
    """False where the payload is not a message of `shared/messages`."""

    @property
    def wildcard(self) -> str:
        """The same as NATS takes it in a subscription."""
        return self.wildcard_of("")

    def wildcard_of(self, service: str) -> str:
        """The same, with a service's name for `<service>`."""
        tokens = self.pattern.split(".")
        own = {"<service>": service} if service else {}
        return ".".join(own.get(each, "*" if each.startswith("<") else each) for each in tokens)


_ALL: Final = tuple(spec.name for spec in SERVICES)
_GATEWAY: Final = ("gateway",)

SUBJECTS: Final = (
    Subject(
        pattern="tm.tokenize.<model>",
        listeners="tokenizer",
        carries="Tokenize -> Tokenized, TokenizeTexts -> TextsTokenized, "
        "PrepareAudio -> AudioPrepared, PrepareSpeech -> SpeechPrepared, "
        "Detokenize -> Detokenized, Describe -> Described, "
        "ReadTokenizer -> TokenizerRead, ReadTokenizerConfig -> TokenizerConfigRead",
        senders=_GATEWAY,
        receivers=("tokenizer",),
        queue="tokenizer",
    ),
    Subject(
        pattern="tm.tokenize.<model>.<id>",
        listeners="one tokenizer",
        carries="the same",
        senders=_GATEWAY,
        receivers=("tokenizer",),
    ),
    Subject(
        pattern="tm.encode.<model>",
        listeners="encoder",
        carries="Encode -> Encoded",
        senders=_GATEWAY,
        receivers=("encoder",),
        queue="encoder",
    ),
    Subject(
        pattern="tm.encode.<model>.<id>",
        listeners="one encoder",
        carries="the same",
        senders=_GATEWAY,
        receivers=("encoder",),
    ),
    Subject(
        pattern="tm.place.<model>",
        listeners="scheduler",
        carries="Place -> any number of Queued, then Placed, "
        "Wake -> any number of Queued, then Awake",
        senders=_GATEWAY,
        receivers=("scheduler",),
        queue="scheduler",
    ),
    Subject(
        pattern="tm.place.<model>.<id>",
        listeners="one scheduler",
        carries="the same",
        # A scheduler passes a Wake on to the one that decides for the model's workers.
        senders=("gateway", "scheduler"),
        receivers=("scheduler",),
    ),
    Subject(
        pattern="tm.worker.<id>.generate",
        listeners="one worker",
        carries="Generate -> Accepted or Refused, Pool -> PoolAnswer or Refused",
        senders=_GATEWAY,
        receivers=("worker",),
    ),
    Subject(
        pattern="tm.worker.<id>.control",
        listeners="one worker",
        carries="Cancel -> Done, Resend -> Done or StreamUnknown, Ping -> Done, Drain -> Done, "
        "Sleep -> Slept, WakeUp -> Woken, StartProfile -> Done, StopProfile -> Profiled",
        senders=("gateway", "scheduler"),
        receivers=("worker",),
    ),
    Subject(
        pattern="tm.worker.<id>.adapters",
        listeners="one worker",
        carries="LoadAdapter -> AdapterLoaded, UnloadAdapter -> AdapterUnloaded",
        senders=_GATEWAY,
        receivers=("worker",),
    ),
    Subject(
        pattern="tm.worker.<id>.blocks",
        listeners="one worker",
        carries="ReplayBlockEvents -> BlockEventsReplayed, ReadBlocks -> BlocksRead",
        senders=("events",),
        receivers=("worker",),
    ),
    Subject(
        pattern="tm.worker.<id>.kv",
        listeners="one worker",
        carries="PrefillKv -> KvStarted or Refused, PollKv -> KvReady, ReleaseKv -> Done",
        senders=("worker",),
        receivers=("worker",),
    ),
    Subject(
        pattern="tm.process.<id>.control",
        listeners="one process of any service",
        carries="Drain -> Done, Ping -> Done, ReadMetrics -> MetricsRead",
        senders=_GATEWAY,
        receivers=_ALL,
    ),
    Subject(
        pattern="tm.gateway.<id>.tokens",
        listeners="one gateway",
        carries="Tokens",
        senders=("worker",),
        receivers=_GATEWAY,
    ),
    Subject(
        pattern="tm.gateway.<id>.prompts",
        listeners="one gateway",
        carries="ReadPrompt -> PromptRead",
        senders=("tokenizer",),
        receivers=_GATEWAY,
    ),
    Subject(
        pattern="tm.gateway.<id>.cancels",
        listeners="one gateway",
        carries="the id of a response or batch that it should end, as text",
        senders=_GATEWAY,
        receivers=_GATEWAY,
        is_ours=False,
    ),
    Subject(
        pattern="tm.abort",
        listeners="gateways with the scale-out routes",
        carries="AbortRequests",
        senders=_GATEWAY,
        receivers=_GATEWAY,
    ),
    Subject(
        pattern="tm.beat.<service>.<id>",
        listeners="all processes",
        carries="Heartbeat",
        senders=_ALL,
    ),
    Subject(
        pattern="tm.kv.<model>.<id>",
        listeners="subscribers outside",
        carries="BlockEvents, BlocksHeld",
        senders=("worker",),
    ),
    Subject(
        pattern="tm.span.<service>",
        listeners="gateways",
        carries="finished spans, OTLP protobuf",
        senders=_ALL,
        is_ours=False,
    ),
    Subject(
        pattern="tm.response.log.<response>",
        listeners="gateways, through JetStream",
        carries="the log of a kept response",
        senders=_GATEWAY,
        receivers=_GATEWAY,
        is_ours=False,
    ),
    Subject(
        pattern="tm.response.open.<gateway>.<response>",
        listeners="gateways, through JetStream",
        carries="one entry while a gateway works on a response",
        senders=_GATEWAY,
        is_ours=False,
    ),
    Subject(
        pattern="tm.response.conversation.<conversation>",
        listeners="gateways, through JetStream",
        carries="a conversation",
        senders=_GATEWAY,
        is_ours=False,
    ),
    Subject(
        pattern="tm.file.<part>.<file>",
        listeners="gateways, through JetStream",
        carries="the content of an upload, in chunks",
        senders=_GATEWAY,
        is_ours=False,
    ),
    Subject(
        pattern="tm.batch.log.<tenant>.<batch>",
        listeners="gateways, through JetStream",
        carries="the log of a batch",
        senders=_GATEWAY,
        is_ours=False,
    ),
    Subject(
        pattern="tm.batch.cancel.<batch>",
        listeners="gateways, through JetStream",
        carries="one entry once the batch is to be cancelled",
        senders=_GATEWAY,
        is_ours=False,
    ),
    Subject(
        pattern="tm.batch.open.<gateway>.<batch>",
        listeners="gateways, through JetStream",
        carries="one entry while a gateway works on a batch",
        senders=_GATEWAY,
        is_ours=False,
    ),
    Subject(
        pattern="$SRV.<verb>.<service>.<id>",
        listeners="all processes; also without id, and without service",
        carries="PING, INFO and STATS of the NATS micro protocol",
        senders=(),
        is_ours=False,
    ),
)
