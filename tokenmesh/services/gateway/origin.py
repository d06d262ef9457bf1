"""Where the page is from that opens a websocket.

Browsers ask nobody before they open one, as they do before a POST with JSON: without this rule any
page on the web could use a gateway without keys that its reader can reach.
"""

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from tokenmesh.shared.errors import Forbidden


def check_origin(headers: Mapping[bytes, bytes], allowed: Sequence[str]) -> None:
    """Raises Forbidden for a page from elsewhere. Programs send no Origin and pass."""
    origin = headers.get(b"origin", b"").decode("latin-1")
    host = headers.get(b"host", b"").decode("latin-1")
    if not origin or "*" in allowed or origin in allowed or _host_of(origin) == host:
        return
    raise Forbidden(f"the origin {origin[:128]!r} is not one of gateway.cors_origins")


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
