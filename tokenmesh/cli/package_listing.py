"""Reads a package's files from its page in the simple API, as JSON (PEP 691) or HTML."""

import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag, urljoin, urlsplit


@dataclass(frozen=True)
class Listed:
    """A file as an index lists it."""

    url: str
    sha256: str
    """Empty where the index does not say."""
    yanked: str
    """Why it was withdrawn by the people who published it; empty: it was not."""


class _Links(HTMLParser):
    """The links of a page of the simple API."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links.append(dict(attrs))


def from_html(text: str, base: str) -> dict[str, Listed]:
    parser = _Links()
    parser.feed(text)
    files: dict[str, Listed] = {}
    for link in parser.links:
        url, fragment = urldefrag(_joined(base, link.get("href") or ""))
        sha256 = re.match(r"sha256=([0-9a-f]{64})", fragment)
        yanked = (link["data-yanked"] or "no reason given") if "data-yanked" in link else ""
        name = unquote(urlsplit(url).path).rpartition("/")[2]
        files[name] = Listed(url, sha256[1] if sha256 else "", yanked)
    return files


def from_json(body: bytes, base: str) -> dict[str, Listed]:
    files: dict[str, Listed] = {}
    listing = json.loads(body)
    entries = listing.get("files") if isinstance(listing, dict) else None
    if not isinstance(entries, list):
        raise ValueError("its list of files is not what PEP 691 describes")
    for entry in entries:
        withdrawn = entry.get("yanked", False)
        yanked = withdrawn if isinstance(withdrawn, str) else "no reason given"
        files[str(entry["filename"])] = Listed(
            _joined(base, str(entry["url"])),
            str(entry.get("hashes", {}).get("sha256", "")),
            yanked if withdrawn is not False else "",
        )
    return files


def _joined(base: str, link: str) -> str:
    """The URL of a link, with the user and password of the index where it is on the same host."""
    index, url = urlsplit(base), urlsplit(urljoin(base, link))
    if "@" in index.netloc and url.netloc == index.netloc.rpartition("@")[2]:
        url = url._replace(netloc=index.netloc)
    return url.geturl()
