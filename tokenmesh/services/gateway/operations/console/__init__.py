"""The console: one static page that reads `/traces`. It loads nothing from anywhere else."""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Final

PAGE: Final = files(__name__).joinpath("index.html").read_bytes()


def _hashes(tag: str) -> str:
    """Sources of a content security policy: what is inside the page's own elements, no more."""
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), PAGE, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(body).digest()).decode()}'" for body in bodies)


HEADERS: Final = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
