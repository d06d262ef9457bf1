"""The error tree, and errors as messages."""

import io

import pytest
from PIL import Image

from tokenmesh.shared import errors
from tokenmesh.shared.errors import TokenMeshError
from tokenmesh.shared.messages import Failed
from tokenmesh.shared.messages.failed import from_failed, to_failed

EVERY_ERROR: list[type[TokenMeshError]] = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, TokenMeshError)
]


@pytest.mark.parametrize("cls", EVERY_ERROR, ids=lambda cls: cls.__name__)
def test_every_error_survives_the_wire(cls: type[TokenMeshError]) -> None:
    error = cls("what happened", param="field", retry_after_s=1.5)
    back = from_failed(to_failed(error))
    assert type(back) is cls
    assert (back.message, back.param, back.retry_after_s) == ("what happened", "field", 1.5)
    assert (to_failed(back).status, to_failed(back).retryable) == (cls.status, cls.retryable)


@pytest.mark.parametrize("cls", EVERY_ERROR, ids=lambda cls: cls.__name__)
def test_no_error_holds_an_address_of_memory(cls: type[TokenMeshError]) -> None:
    image = Image.new("RGB", (1, 1))
    for each in (object(), io.BytesIO(), image, io.BytesIO().read, lambda: 0, image.load):
        error = cls(f"Error opening {each!r}: no format")
        assert f"{id(each):#x}" not in error.message.lower()
        assert "0x" not in f"{error}{to_failed(error).message}"
        assert error.message.startswith("Error opening <")
        assert error.message.endswith(">: no format")
    assert cls("[mov @ 0x55d0c0ffee00] moov atom not found").message.startswith("[mov] moov")
    # numbers that a client wrote are kept
    assert cls("http://0x7f000001/a at 0x1, id 0x123456789").message.count("0x") == 3


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in EVERY_ERROR]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("cls", EVERY_ERROR, ids=lambda cls: cls.__name__)
def test_the_table_at_the_top_of_the_file_is_true(cls: type[TokenMeshError]) -> None:
    words = next(
        line.split() for line in (errors.__doc__ or "").splitlines() if f" {cls.__name__} " in line
    )
    after_name = words[words.index(cls.__name__) + 1 :]
    assert after_name[0] == str(cls.status)
    assert after_name[1].rstrip(",") == cls.code
    inherited = "retryable" in " ".join(after_name)
    assert inherited == cls.retryable


@pytest.mark.parametrize(
    ("is_retryable", "expected"), [(True, errors.Unavailable), (False, TokenMeshError)]
)
def test_code_of_a_newer_version_becomes_its_nearest_base(
    is_retryable: bool, expected: type[TokenMeshError]
) -> None:
    failed = Failed(code="invented_later", message="m", status=599, retryable=is_retryable)
    assert type(from_failed(failed)) is expected


def test_a_failure_that_may_be_retried_stays_one() -> None:
    failed = Failed(code="internal_error", message="a row has failed", retryable=True)
    assert from_failed(failed).retryable


def test_the_path_of_a_field_survives_the_wire() -> None:
    error = errors.InvalidInput("odd", param="messages", path=("messages", 0, "content"))
    back = from_failed(to_failed(error))
    assert isinstance(back, errors.InvalidInput)
    assert back.path == ("messages", 0, "content")


def test_a_path_that_the_param_names_is_not_sent() -> None:
    assert to_failed(errors.InvalidInput("odd", param="stop")).path == ()


@pytest.mark.parametrize(
    ("path", "message", "expected"),
    [
        (("messages", 0, "role"), "messages[0].role is missing", "messages[3][0].role is missing"),
        (("messages",), "your messages are long", "messages[3]: your messages are long"),
        (("temperature",), "temperature is odd", "messages[3]: temperature is odd"),
    ],
)
def test_an_error_about_one_of_several_prompts_names_it(
    path: errors.FieldPath, message: str, expected: str
) -> None:
    error = errors.InvalidInput(message, param=str(path[0]), path=path)
    found = error.within(("messages", 3))
    assert found.message == expected
    assert found.param == ("messages[3]" if path[0] == "messages" else path[0])
    assert error.within(()) is error


def test_an_error_about_no_field_is_not_reworded() -> None:
    renamed = errors.InvalidInput("it is refused, (again)").renamed("input[2]")
    assert (renamed.message, renamed.param) == ("it is refused, (again)", None)
