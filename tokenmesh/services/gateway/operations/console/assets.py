"""The page of the console and its files, as vite builds them from the folder `console/`.

They hold no data: the page reads it from the API with the key that its user types.
"""

from hashlib import sha256
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from tokenmesh.shared.errors import NotFound

_TYPES: Final = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
PAGE: Final = "index.html"
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data: blob:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}


class _Asset:
    def __init__(self, name: str) -> None:
        self.data = files(__package__).joinpath("built", name).read_bytes()
        tag = f'"{sha256(self.data).hexdigest()[:32]}"'
        self.headers = {**HEADERS, "Content-Type": _TYPES[name], "ETag": tag}


_ASSETS: Final = {name: _Asset(name) for name in _TYPES}


def asset_response(name: str, request: Request) -> Response:
    """A file, or 304 where the browser has it already. Raises NotFound."""
    asset = _ASSETS.get(name)
    if asset is None:
        raise NotFound(f"the console has no file {name[:80]!r}")
    if request.headers.get("if-none-match") == asset.headers["ETag"]:
        return Response(status_code=304, headers=asset.headers)
    return Response(asset.data, headers=asset.headers)
