"""ApiTable: the APIs of a gateway, found by the path of a request."""

import re
from collections.abc import Sequence
from typing import Any, Final

from tokenmesh.services.gateway.core.api import AnswerKind, Api
from tokenmesh.services.gateway.core.context import RequestContext
from tokenmesh.services.gateway.core.http.errors import write_error
from tokenmesh.shared.errors import TokenMeshError

OTHER_KIND: Final = AnswerKind("req")


class ApiTable:
    """Refuses at the start what two APIs claim for themselves."""

    def __init__(self, apis: Sequence[Api]) -> None:
        self.apis = apis
        self.kinds: dict[str, AnswerKind] = {}
        """It holds what a path is answered with; others are of `OTHER_KIND`."""
        for api in apis:
            for path, kind in api.answer_kinds.items():
                assert path not in self.kinds, path
                self.kinds[path] = kind
        self._exempt = {
            method: _any_of([path for api in apis for path in api.exempt.get(method, ())])
            for method in {method for api in apis for method in api.exempt}
        }

    def hint(self, path: str) -> str | None:
        """Return what to do instead of calling a path that is not served."""
        return next((api.hints[path] for api in self.apis if path in api.hints), None)

    def find(self, path: str) -> Api | None:
        """The API that writes the errors of a path; None: they have the gateway's own format."""
        return next((api for api in self.apis if path.startswith(api.prefixes)), None)

    def write_error(self, error: TokenMeshError, context: RequestContext) -> tuple[Any, int]:
        """The body of a refused request's response, and its status."""
        api = self.find(context.path)
        return (write_error if api is None else api.write_error)(error, context)

    def is_exempt(self, method: str, path: str) -> bool:
        """Return whether a request does not count against its tenant's limits."""
        exempt = self._exempt.get(method)
        return exempt is not None and exempt.fullmatch(path) is not None


def _any_of(paths: Sequence[str]) -> re.Pattern[str]:
    return re.compile(f"(?:{'|'.join(paths)})")
