"""Every subject that a process of the mesh listens to or publishes on, as `subjects` builds them.

Written for `docs/reference/subjects.md`. A test compares it with what services really listen to.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Subject:
    """One row. `<name>` stands for one token."""

    pattern: str
    listeners: str
    carries: str
    """Messages, each with its answers."""
    queue: str = ""
    """Name of the queue group: one of its members gets each message."""
    is_ours: bool = True
    """Whether what travels is a message of `shared/messages`."""

    @property
    def wildcard(self) -> str:
        """The same as NATS takes it in a subscription."""
        return ".".join("*" if each.startswith("<") else each for each in self.pattern.split("."))


SUBJECTS: Final = (
    Subject(
        "tm.tokenize.<model>",
        "tokenizer",
        "Tokenize -> Tokenized, Detokenize -> Detokenized, Describe -> Described, "
        "ReadTokenizer -> TokenizerRead, ReadTokenizerConfig -> TokenizerConfigRead",
        queue="tokenizer",
    ),
    Subject("tm.tokenize.<model>.<id>", "one tokenizer", "the same"),
    Subject("tm.encode.<model>", "encoder", "Encode -> Encoded", queue="encoder"),
    Subject("tm.encode.<model>.<id>", "one encoder", "the same"),
    Subject(
        "tm.place.<model>",
        "scheduler",
        "Place -> any number of Queued, then Placed",
        queue="scheduler",
    ),
    Subject("tm.place.<model>.<id>", "one scheduler", "the same"),
    Subject("tm.worker.<id>.generate", "one worker", "Generate -> Accepted or Refused"),
    Subject(
        "tm.worker.<id>.control",
        "one worker",
        "Cancel -> Done, Resend -> Done or StreamUnknown, Ping -> Done, Drain -> Done, "
        "Sleep -> Slept, WakeUp -> Woken, StartProfile -> Done, StopProfile -> Profiled",
    ),
    Subject(
        "tm.worker.<id>.blocks",
        "one worker",
        "ReplayBlockEvents -> BlockEventsReplayed, ReadBlocks -> BlocksRead",
    ),
    Subject(
        "tm.process.<id>.control",
        "one process of any service",
        "Drain -> Done, ReadMetrics -> MetricsRead",
    ),
    Subject("tm.gateway.<id>.tokens", "one gateway", "Tokens"),
    Subject("tm.gateway.<id>.prompts", "one gateway", "ReadPrompt -> PromptRead"),
    Subject(
        "tm.gateway.<id>.cancels",
        "one gateway",
        "the id of a response that it should end, as text",
        is_ours=False,
    ),
    Subject("tm.abort", "gateways with the scale-out routes", "AbortRequests"),
    Subject("tm.beat.<service>.<id>", "everybody", "Heartbeat"),
    Subject("tm.kv.<model>.<id>", "subscribers outside", "BlockEvents, BlocksHeld"),
    Subject("tm.span.<service>", "gateways", "finished spans, OTLP protobuf", is_ours=False),
    Subject(
        "tm.response.log.<response>",
        "gateways, through JetStream",
        "the log of a kept response",
        is_ours=False,
    ),
    Subject(
        "tm.response.open.<gateway>.<response>",
        "gateways, through JetStream",
        "one entry while a gateway works on a response",
        is_ours=False,
    ),
    Subject(
        "$SRV.<verb>.<service>.<id>",
        "everybody; also without id, and without service",
        "PING, INFO and STATS of the NATS micro protocol",
        is_ours=False,
    ),
)
