"""The table of rights: no service may do what only another one has to do."""

import pytest

from tokenmesh.shared.rights import (
    EVENTS,
    SERVICE_USERS,
    USERS,
    inbox_prefix,
    nats_users,
    published,
    redis_users,
    subscribed,
)
from tokenmesh.shared.subject_table import SUBJECTS


def test_every_user_in_the_table_of_subjects_is_known() -> None:
    named = {user for each in SUBJECTS for user in (*each.senders, *each.receivers)}
    assert named <= set(USERS)
    assert [each.pattern for each in SUBJECTS if not each.senders] == ["$SRV.<verb>.<service>.<id>"]


@pytest.mark.parametrize("user", [user for user in USERS if user != "worker"])
def test_only_workers_publish_tokens_and_block_events(user: str) -> None:
    assert "tm.gateway.*.tokens" not in published(user)
    assert "tm.kv.*.*" not in published(user)


def test_heartbeats_and_spans_are_published_under_the_own_name_only() -> None:
    for user in SERVICE_USERS:
        own = {name for name in published(user) if name.startswith(("tm.beat.", "tm.span."))}
        assert own == {f"tm.beat.{user}.*", f"tm.span.{user}"}


def test_inboxes_are_apart() -> None:
    for user in USERS:
        inboxes = {name for name in subscribed(user) if name.startswith("_INBOX")}
        assert f"_INBOX.{user}.>" in inboxes
        assert inboxes <= {f"_INBOX.{user}.>", "_INBOX_EVENTS.>"}
    assert inbox_prefix("worker-1a2b") == "_INBOX.worker"
    assert inbox_prefix("a name, of no service") == "_INBOX.a"


def test_no_wildcard_covers_everything() -> None:
    for user in USERS:
        for name in (*published(user), *subscribed(user)):
            assert name.split(".")[0] not in (">", "*")
            assert not name.startswith("$JS.API.>")


def test_the_subscriber_from_outside_reads_block_events_only() -> None:
    assert published(EVENTS) == ("tm.worker.*.blocks",)
    assert "tm.kv.>" in subscribed(EVENTS)
    assert "allow_responses" not in nats_users({EVENTS: '"p"'})


def test_no_redis_user_sees_all_keys_and_the_default_user_is_off() -> None:
    lines = redis_users(dict.fromkeys(SERVICE_USERS, "p")).splitlines()
    assert lines[0] == "user default reset off"
    assert len(lines) == len(SERVICE_USERS) + 2
    assert not any(" ~* " in line or "+@all" in line for line in lines)
