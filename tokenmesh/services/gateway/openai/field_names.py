"""FieldNames: what a client calls the fields of the chat that its request was translated to.

Other code checks the chat; its errors are renamed before the client sees them.
"""

from collections.abc import Mapping

from tokenmesh.shared.errors import FieldPath, InvalidInput, TokenMeshError, field_name


class FieldNames:
    """Maps paths in a chat to names in the client's body."""

    def __init__(self, names: Mapping[str, str], sources: Mapping[FieldPath, str]) -> None:
        """`names`: of fields such as `max_tokens`; `sources`: of paths in messages and tools."""
        self._names: dict[FieldPath, str] = {
            tuple(field.split(".")): name for field, name in names.items()
        }
        self._names |= sources

    def name_of(self, path: FieldPath) -> str:
        """The client's name: the longest known beginning of the path is replaced."""
        for end in range(len(path), 0, -1):
            name = self._names.get(path[:end])
            if name is not None:
                return field_name((name, *path[end:]))
        return field_name(path)

    def rename(self, error: TokenMeshError) -> TokenMeshError:
        """The same error with the client's names; only InvalidInput names fields."""
        if not isinstance(error, InvalidInput) or not error.path:
            return error
        name = self.name_of(error.path)
        return error if name == field_name(error.path) else error.renamed(name)
