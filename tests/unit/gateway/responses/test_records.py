"""Records of earlier versions can be read."""

import pytest

from tokenmesh.services.gateway.apis.responses.records import (
    Adopted,
    CallBegun,
    CallEnded,
    Flushed,
    Portion,
    Prompted,
    Record,
    ResponseBegun,
    ResponseEnded,
    ToolsListed,
    decode_records,
    encode_record,
    frames_of,
    join_records,
)
from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.ids import GatewayId, ModelName, ResponseId
from tokenmesh.shared.messages.tokens import TokenLogprobs
from tokenmesh.shared.tokens import pack_ids

LOGPROBS = [TokenLogprobs(5, -0.5, 1, [5], [-0.5])]
PORTION = Portion(pack_ids([5, 6]), LOGPROBS, "stop", 6, 3)
RECORDS: list[Record] = [
    ResponseBegun(
        id=ResponseId("resp_1"),
        owner=GatewayId("gateway-1"),
        scope="ab",
        model=ModelName("m"),
        body=b"{}",
        created_s=1.5,
        deadline_s=9.5,
        seed=7,
        is_background=True,
    ),
    Prompted(turn=1, packed_ids=pack_ids([1, 2]), max_tokens=9, has_media=True),
    Flushed(portions=[PORTION], frames=[b"event: a\n\n"]),
    ToolsListed(place="tools[0]", tools=b"[]", frames=[b"x"]),
    CallBegun(item="mcp_1", frames=[b"x"]),
    CallEnded(item="mcp_1", output="42", error="no", frames=[b"x"]),
    Adopted(owner=GatewayId("gateway-2"), reason="gateway gone"),
    ResponseEnded(status="completed", response=b"{}", portions=[PORTION], frames=[b"x"]),
]
# Never change a line; a new field gets a default, and these still decode.
GOLDEN = [
    "8aa474797065a5426567756ea26964a6726573705f31a56f776e6572a9676174657761792d31a573636f7065a26162"
    "a56d6f64656ca16da4626f6479c4027b7da9637265617465645f73cb3ff8000000000000aa646561646c696e655f73"
    "cb4023000000000000a47365656407ad69735f6261636b67726f756e64c3",
    "85a474797065a850726f6d70746564a47475726e01aa7061636b65645f696473c4080100000002000000aa6d61785f"
    "746f6b656e7309a96861735f6d65646961c3",
    "83a474797065a7466c7573686564a8706f7274696f6e739195c4080500000006000000919505cbbfe0000000000000"
    "01910591cbbfe0000000000000a473746f700603a66672616d657391c40a6576656e743a20610a0a",
    "84a474797065ab546f6f6c734c6973746564a5706c616365a8746f6f6c735b305da5746f6f6c73c4025b5da6667261"
    "6d657391c40178",
    "83a474797065a943616c6c426567756ea46974656da56d63705f31a66672616d657391c40178",
    "85a474797065a943616c6c456e646564a46974656da56d63705f31a66f7574707574a23432a56572726f72a26e6fa6"
    "6672616d657391c40178",
    "83a474797065a741646f70746564a56f776e6572a9676174657761792d32a6726561736f6eac676174657761792067"
    "6f6e65",
    "85a474797065a5456e646564a6737461747573a9636f6d706c65746564a8726573706f6e7365c4027b7da8706f7274"
    "696f6e739195c4080500000006000000919505cbbfe000000000000001910591cbbfe0000000000000a473746f7006"
    "03a66672616d657391c40178",
]
NAMES = [type(record).__name__ for record in RECORDS]


@pytest.mark.parametrize(("record", "golden"), list(zip(RECORDS, GOLDEN, strict=True)), ids=NAMES)
def test_old_bytes_decode(record: Record, golden: str) -> None:
    assert decode_records(join_records([bytes.fromhex(golden)])) == [record]


def test_an_entry_holds_its_records_in_order() -> None:
    entry = join_records([encode_record(record) for record in RECORDS])
    assert decode_records(entry) == RECORDS


@pytest.mark.parametrize("data", [b"", b"\x91", b"\x90\x90", b"\x91\x81\xa4type\xa4Junk", b"\xc0"])
def test_junk_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_records(data)


def test_a_portion_becomes_the_output_it_was() -> None:
    output = PORTION.output()
    assert (output.token_ids, output.finish, output.stop_token) == ([5, 6], "stop", 6)
    assert Portion.of(output) == PORTION


def test_frames_are_those_that_clients_see() -> None:
    assert sum(len(frames_of(record)) for record in RECORDS) == 5
