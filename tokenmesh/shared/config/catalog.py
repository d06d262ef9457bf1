"""The keys of the settings, with their types and descriptions."""

from collections.abc import Iterator, Mapping
from functools import cache

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tokenmesh.shared.config.layers import MODEL
from tokenmesh.shared.config.model import ModelSettings
from tokenmesh.shared.config.settings import Settings

Key = tuple[str, ...]


def fields() -> Iterator[tuple[Key, FieldInfo]]:
    """Every key there is: sections before their fields, `model` for a single model last."""
    yield from _fields_of(Settings, ())
    yield from _fields_of(ModelSettings, (MODEL,))


def field_at(key: Key) -> FieldInfo:
    """The field behind a key; KeyError when there is none."""
    return _by_key()[key]


@cache
def _by_key() -> Mapping[Key, FieldInfo]:
    return dict(fields())


def is_section(field: FieldInfo) -> bool:
    """Whether a field holds further fields."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _fields_of(section: type[BaseModel], path: Key) -> Iterator[tuple[Key, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield (*path, name), field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields_of(field.annotation, (*path, name))
