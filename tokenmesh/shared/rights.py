"""Says what each user of NATS and Redis may do: permissions from the table of subjects, and ACLs.

A user is a service, `up`, which waits for services and watches the store of JetStream, or
`events`, which subscribes to block events from outside. `tokenmesh up` configures its servers with
this; compose and the chart hold files that `scripts/generate_rights.py` writes from it.

Every process receives answers on inboxes of its user's. A service may publish there only once for
each request that it received, so it cannot answer a request that was sent to another service.
"""

import re
from collections.abc import Mapping
from typing import Final

from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.services import SERVICE_BY_NAME, SERVICES, ServiceSpec
from tokenmesh.shared.subject_table import SUBJECTS
from tokenmesh.shared.subjects import ALL_BEATS, ALL_BLOCK_EVENTS, ALL_SPANS, beat

INBOXES: Final = "_INBOX"
EVENTS: Final = "events"
UP: Final = "up"
SERVICE_USERS: Final = tuple(spec.name for spec in SERVICES)
ADMIN: Final = "admin"
"""Has all rights; only tools that test a mesh make such a user."""
USERS: Final = (*SERVICE_USERS, UP, EVENTS)

ANY: Final = InstanceId("*")
MICRO: Final = "$SRV.>"
RESPONSE_STREAM: Final = "tm-responses"
"""The JetStream stream with the logs of responses."""
FILE_STREAM: Final = "tm-files"
"""The one with the content of uploads."""
BATCH_STREAM: Final = "tm-batches"
"""The one with the logs of batches."""
STREAMS: Final = (RESPONSE_STREAM, FILE_STREAM, BATCH_STREAM)
_STREAM_VERBS: Final = ("INFO", "CREATE", "UPDATE", "PURGE")
_EVENTS_INBOXES: Final = "_INBOX_EVENTS.>"
_ANSWER_LIMITS: Final = '{ max: 1, expires: "15m" }'
"""One answer for each request, for longer than `service.handler_timeout_s`."""

_MORE_PUBLISHED: Final[dict[str, tuple[str, ...]]] = {
    "gateway": (
        *(f"$JS.API.STREAM.{verb}.{stream}" for stream in STREAMS for verb in _STREAM_VERBS),
        *(f"$JS.API.DIRECT.GET.{stream}" for stream in STREAMS),
        "$JS.API.INFO",
    ),
    # A placement, or a wake, has any number of `Queued` answers before its last one.
    "scheduler": (f"{INBOXES}.gateway.>",),
    UP: ("$JS.API.STREAM.NAMES", "$JS.API.STREAM.PURGE.*"),
}
_MORE_SUBSCRIBED: Final[dict[str, tuple[str, ...]]] = {
    "gateway": (ALL_SPANS,),
    UP: (ALL_BEATS,),
    EVENTS: (ALL_BLOCK_EVENTS, _EVENTS_INBOXES),
}


_FIRST_WORD: Final = re.compile(r"\w+", re.ASCII)


def inbox_prefix(instance: str) -> str:
    """Where a process receives answers; `instance` is its id, which begins with its user."""
    word = _FIRST_WORD.match(instance)
    return f"{INBOXES}.{word[0] if word else '_'}"


def published(user: str) -> tuple[str, ...]:
    """The subjects on which a user may publish, as NATS takes them."""
    own = [each.wildcard_of(user) for each in SUBJECTS if user in each.senders]
    return (*own, *_MORE_PUBLISHED.get(user, ()))


def subscribed(user: str) -> tuple[str, ...]:
    """The subjects to which a user may subscribe, inboxes included."""
    own = (each.wildcard for each in SUBJECTS if user in each.receivers)
    spec = SERVICE_BY_NAME.get(user)
    of_service = (*heartbeats_of(spec, ANY), MICRO) if spec else ()
    more = _MORE_SUBSCRIBED.get(user, ())
    return (*own, *of_service, *more, f"{inbox_prefix(user)}.>")


def heartbeats_of(spec: ServiceSpec, instance: InstanceId) -> tuple[str, ...]:
    """Subjects of the heartbeats that an instance receives."""
    if spec.heartbeats == "all":
        return (ALL_BEATS,)
    if spec.heartbeats == "gateways":
        return beat("gateway", ANY), beat(spec.name, instance)
    return ()


def nats_user(user: str, password: str) -> str:
    """One entry of `authorization.users`; `password` is text in quotes or `$VARIABLE`."""
    if user == ADMIN:
        return f"  {{ user: {user}, password: {password} }}"
    allowed = {"publish": published(user), "subscribe": subscribed(user)}
    lines = [f"  {{ user: {user}, password: {password}, permissions: {{"]
    for verb, names in allowed.items():
        quoted = ", ".join(f'"{name}"' for name in names)
        lines.append(f"    {verb}: {{ allow: [{quoted}] }}")
    if user in SERVICE_USERS:
        lines.append(f"    allow_responses: {_ANSWER_LIMITS}")
    return "\n".join(lines) + "\n  } }"


def nats_users(passwords: Mapping[str, str]) -> str:
    """The section `authorization` of a NATS server's configuration."""
    users = "\n".join(nats_user(user, password) for user, password in passwords.items())
    return f"authorization {{ users: [\n{users}\n] }}\n"


_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "gateway": ("tm:tenants", "tm:tenant:*", "tm:blob:*", "tm:adapters:*", "kvx:*:rsv:*"),
    "tokenizer": ("tm:blob:*",),
    "encoder": ("tm:blob:*",),
    "scheduler": ("kvx:*", "tm:wake:*"),
    "worker": ("tm:blob:*", "tm:adapters:*", "kvx:*"),
}
_COMMANDS: Final = (
    "+@read +@write +@connection -@dangerous -@blocking +eval +evalsha +multi +exec +time +info"
)


def redis_user(service: str, password: str) -> str:
    """One line of the ACL of a Redis or Valkey."""
    if service == ADMIN:
        return f"user {service} reset on >{password} ~* +@all"
    keys = " ".join(f"~{key}" for key in _KEYS[service])
    return f"user {service} reset on >{password} {keys} {_COMMANDS}"


def redis_users(passwords: Mapping[str, str]) -> str:
    """All of them; nothing works without a user, but for a ping by a health check."""
    lines = ["user default reset off", "user health reset on nopass -@all +ping"]
    lines += [redis_user(service, password) for service, password in passwords.items()]
    return "\n".join(lines) + "\n"
