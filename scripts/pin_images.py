"""Adds digests to the images of others in compose, the chart and the Dockerfile.

    python scripts/pin_images.py            look up each tag at its registry, write the digests
    python scripts/pin_images.py --check    write nothing; 1 where a digest is not current
    python scripts/pin_images.py --remove   the tags alone again

It needs a way to the registries and no Docker. `--registry URL` looks every image up at one mirror.
A digest names the list of all platforms, so that the same file serves each of them.
"""

import argparse
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPResponse
from json import load
from pathlib import Path
from typing import Final
from urllib.parse import urlencode, urlsplit

ROOT: Final = Path(__file__).resolve().parent.parent
FILES: Final = (
    ROOT / "compose/Dockerfile",
    ROOT / "compose/compose.yaml",
    ROOT / "compose/observe.yaml",
    ROOT / "deploy/chart/values.yaml",
)
_IMAGE: Final = re.compile(
    r"^(?P<before>\s*image: |ARG BASE=)(?P<name>[\w./-]+):(?P<tag>[\w.-]+)"
    r"(?P<digest>@sha256:[0-9a-f]{64})?(?=\s|$)",
    re.MULTILINE,
)
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_MANIFESTS: Final = (
    "application/vnd.oci.image.index.v1+json, "
    "application/vnd.docker.distribution.manifest.list.v2+json"
)
_HUB: Final = "registry-1.docker.io"
_CHALLENGE: Final = re.compile(r'(\w+)="([^"]*)"')
_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Image:
    """A name with its tag, as files have it."""

    name: str
    tag: str

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}"

    def address(self, mirror: str | None) -> str:
        """The URL of its manifest."""
        host, _, path = self.name.partition("/")
        if "." not in host and ":" not in host:
            host = _HUB
            path = self.name if "/" in self.name else f"library/{self.name}"
        return f"{mirror or f'https://{host}'}/v2/{path}/manifests/{self.tag}"


Resolve = Callable[[Image], str]


def digest_of(image: Image, mirror: str | None = None) -> str:
    """The digest that a registry has for a tag now. Raises OSError, and ValueError without one."""
    request = urllib.request.Request(image.address(mirror), headers={"Accept": _MANIFESTS})
    try:
        answer = _open(request)
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        token = _token_of(error.headers.get("WWW-Authenticate", ""))
        request.add_header("Authorization", f"Bearer {token}")
        answer = _open(request)
    with answer:
        digest = answer.headers.get("Docker-Content-Digest", "")
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{image}: the registry sent no digest")
    return str(digest)


def _open(request: urllib.request.Request) -> HTTPResponse:
    if urlsplit(request.full_url).scheme not in ("http", "https"):
        raise ValueError(f"not an address of a registry: {request.full_url}")
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    return answer


def _token_of(challenge: str) -> str:
    """Fetch the token that a registry of public images gives to everyone."""
    fields = dict(_CHALLENGE.findall(challenge))
    query = urlencode({name: fields[name] for name in ("service", "scope") if name in fields})
    with _open(urllib.request.Request(f"{fields['realm']}?{query}")) as answer:
        found = load(answer)
    return str(found.get("token") or found["access_token"])


def images(text: str) -> list[Image]:
    """Every image of a file that has a tag."""
    return [Image(found["name"], found["tag"]) for found in _IMAGE.finditer(text)]


def with_digests(text: str, resolve: Resolve | None) -> str:
    """The text with the digest of each image; `resolve` None: with none."""

    def replace(found: re.Match[str]) -> str:
        image = Image(found["name"], found["tag"])
        digest = "" if resolve is None else f"@{resolve(image)}"
        return f"{found['before']}{image}{digest}"

    return _IMAGE.sub(replace, text)


def main(arguments: Sequence[str] | None = None, files: Sequence[Path] = FILES) -> int:
    """Write or compare; 1 where `--check` differs, 2 where a registry does not answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--remove", action="store_true")
    parser.add_argument("--registry", metavar="URL")
    options = parser.parse_args(arguments)
    known: dict[Image, str] = {}

    def resolve(image: Image) -> str:
        if image not in known:
            known[image] = digest_of(image, options.registry)
        return known[image]

    texts = {path: path.read_text("utf-8") for path in files}
    try:
        new = {
            path: with_digests(text, None if options.remove else resolve)
            for path, text in texts.items()
        }
    except (OSError, ValueError) as error:
        print(f"nothing is written: {error}", file=sys.stderr)
        return 2
    changed = [path for path in files if texts[path] != new[path]]
    for path in changed:
        print(f"{'not current' if options.check else 'written'}: {path}")
        if not options.check:
            path.write_text(new[path], "utf-8")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
