"""Subjects: every model name gives one NATS token, and different names different ones."""

import re

from hypothesis import given
from hypothesis import strategies as st

from tokenmesh.shared import subjects
from tokenmesh.shared.ids import InstanceId, ModelName, WorkerId

ONE_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
NAMES = st.text(min_size=1, max_size=30).map(ModelName)


@given(NAMES)
def test_any_model_name_becomes_one_token(name: ModelName) -> None:
    assert ONE_TOKEN.fullmatch(subjects.slug(name))


@given(NAMES, NAMES)
def test_different_names_have_different_tokens(one: ModelName, other: ModelName) -> None:
    assert (subjects.slug(one) == subjects.slug(other)) == (one == other)


def test_readable_names_stay_readable() -> None:
    assert subjects.tokenize(ModelName("tiny-llama_2")) == "tm.tokenize.tiny-llama_2"
    assert subjects.place(ModelName("meta/Llama-3.1")).startswith("tm.place.meta-Llama-3-1-")


def test_one_wildcard_covers_place_for_every_model() -> None:
    assert subjects.place_any() == "tm.place.*"
    assert subjects.place(ModelName("a/b c.d")).count(".") == 2


def test_subjects_are_those_of_the_architecture() -> None:
    assert subjects.worker_generate(WorkerId("w-1")) == "tm.worker.w-1.generate"
    assert subjects.worker_control(WorkerId("w-1")) == "tm.worker.w-1.control"
    assert subjects.beat("worker", InstanceId("w-1")) == "tm.beat.worker.w-1"
    assert subjects.micro("PING") == "$SRV.PING"
    assert subjects.micro("STATS", "tokenmesh-worker", InstanceId("w-1")) == (
        "$SRV.STATS.tokenmesh-worker.w-1"
    )
