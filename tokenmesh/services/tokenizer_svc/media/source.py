"""Where an image's bytes come from: a data URI, an upload, a gateway's blob, or a URL."""

import base64
import binascii
from typing import Final

from tokenmesh.services.tokenizer_svc.media.fetch import Fetcher
from tokenmesh.shared.blobs import Blobs
from tokenmesh.shared.errors import InvalidInput, NotFound, PayloadTooLarge
from tokenmesh.shared.ids import BlobKey

DATA_SCHEME: Final = "data:"
BLOB_SCHEME: Final = "blob:"
"""Written by the gateway in place of large data URIs; it refuses the scheme from clients."""

UPLOAD_PREFIX: Final = "file-"


def upload_key(upload_id: str) -> BlobKey:
    """Where the gateway stores an uploaded file."""
    return BlobKey(f"tm:file:{upload_id}")


async def read_source(
    url: str, fetcher: Fetcher, blobs: Blobs, max_bytes: int, tenant: str
) -> bytes:
    """The bytes behind a `url` that is not a data URI. Raises InvalidInput, NotFound or
    PayloadTooLarge."""
    if url.startswith(BLOB_SCHEME):
        return _bounded(await blobs.get(BlobKey(url.removeprefix(BLOB_SCHEME))), max_bytes)
    if url.startswith(UPLOAD_PREFIX):
        try:
            return _bounded(await blobs.get(upload_key(url)), max_bytes)
        except NotFound as error:
            raise NotFound(f"the upload {url!r} does not exist or has expired") from error
    return await fetcher.fetch(url, tenant)


def decode_data_uri(uri: str, max_bytes: int) -> bytes:
    """The bytes in a base64 data URI."""
    head, separator, body = uri.partition(",")
    if not separator or not head.endswith(";base64"):
        raise InvalidInput("the data URI is not of the form data:image/...;base64,...")
    # Four characters carry three bytes: no need to decode what is too large anyway.
    if len(body) // 4 * 3 > max_bytes + 3:
        raise PayloadTooLarge(f"the file has more than {max_bytes} bytes")
    try:
        return _bounded(base64.b64decode(body, validate=True), max_bytes)
    except binascii.Error as error:
        raise InvalidInput(f"the data URI is not base64: {error}") from error


def _bounded(data: bytes, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise PayloadTooLarge(f"the file has {len(data)} bytes, at most {max_bytes}")
    return data
