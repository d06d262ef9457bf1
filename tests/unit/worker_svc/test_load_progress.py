"""A worker reports its progress while it reads its weights."""

import json
import logging

import pytest

from tokenmesh.services.worker_svc.loaded import LoadProgress
from tokenmesh.shared.ids import InstanceId
from tokenmesh.shared.logs import JsonFormatter

GIB = 1 << 30


def test_each_tenth_is_reported_once_with_bytes_and_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    progress = LoadProgress()
    for done in range(0, 201):
        progress(done * GIB // 100, 2 * GIB)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 11
    assert messages[0].startswith("weights 0 %: 0.00 of 2.00 GiB in ")
    assert messages[5].startswith("weights 50 %: 1.00 of 2.00 GiB in ")
    assert messages[10].startswith("weights 100 %")
    assert messages[10].endswith(" s")


def test_a_jump_is_reported_once_and_an_empty_checkpoint_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    progress = LoadProgress()
    progress(95, 100)
    progress(96, 100)
    progress(100, 100)
    LoadProgress()(0, 0)
    assert len(caplog.records) == 3


def test_the_share_is_in_the_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    LoadProgress()(1, 4)
    line = JsonFormatter("worker", InstanceId("worker-1")).format(caplog.records[0])
    assert json.loads(line)["progress"] == 0.25
