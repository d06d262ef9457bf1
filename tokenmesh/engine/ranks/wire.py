"""Plans as bytes, for ranks that carry out what another one has planned."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import msgspec

from tokenmesh.engine.adapters.matrices import AdapterMatrices
from tokenmesh.engine.plan import NewRow, StepPlan
from tokenmesh.shared.tensor_blob import TensorBlob


class _BlobOnWire(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(slots=True)
class _RowOnWire(NewRow):
    """A row without what only the rank that draws needs, in types that can be decoded."""

    embeddings: dict[str, _BlobOnWire] = field(default_factory=dict)  # type: ignore[assignment]
    grammar: None = None
    adapter: int | None = None  # type: ignore[assignment]


class _PlanOnWire(StepPlan):
    new_rows: list[_RowOnWire] = msgspec.field(default_factory=list)  # type: ignore[assignment]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_PlanOnWire)


def encode_plan(
    plan: StepPlan, adapters: Mapping[AdapterMatrices, int] = MappingProxyType({})
) -> bytes:
    """The plan without grammars, which only draws need, and with numbers for matrices."""
    if any(new.grammar is not None or new.adapter is not None for new in plan.new_rows):
        rows = [
            replace(
                new,
                grammar=None,
                adapter=None if new.adapter is None else adapters[new.adapter],  # type: ignore[arg-type]
            )
            for new in plan.new_rows
        ]
        plan = msgspec.structs.replace(plan, new_rows=rows)
    return _encoder.encode(plan)


def decode_plan(data: bytes) -> StepPlan:
    """With numbers where rows have adapters. Raises msgspec.ValidationError for bytes of another
    version."""
    plan = _decoder.decode(data)
    for new in plan.new_rows:
        if new.embeddings:
            blobs = {
                key: TensorBlob(blob.dtype, blob.shape, blob.data)
                for key, blob in new.embeddings.items()
            }
            new.embeddings = blobs  # type: ignore[assignment]
    return plan
