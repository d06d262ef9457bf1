"""ImageDecoder: image files to a model's pixels, in processes that are killed when late."""

from pathlib import Path
from typing import Final

from tokenmesh.services.tokenizer_svc.media.decode_child import INVALID, PIXELS, TOO_LARGE
from tokenmesh.shared.child_pool import ChildDied, ChildLate, ChildLimits, ChildPool
from tokenmesh.shared.config.model import MediaSettings
from tokenmesh.shared.errors import InvalidInput, PayloadTooLarge, ProtocolError

_CHILD: Final = "tokenmesh.services.tokenizer_svc.media.decode_child"


class ImageDecoder:
    """Of one model. Tenants take turns. `stop` ends the processes."""

    def __init__(self, limits: MediaSettings, checkpoint: Path) -> None:
        self._pool = ChildPool(
            "images to be decoded",
            _CHILD,
            (
                str(limits.decode_timeout_s),
                str(limits.decode_memory_bytes),
                str(limits.max_pixels),
                str(checkpoint),
            ),
            ChildLimits(
                limits.decode_processes,
                limits.decode_queue,
                limits.decode_timeout_s,
                most_each=limits.decode_processes,
            ),
            b"",
        )

    async def decode(self, data: bytes, tenant: str) -> bytes:
        """The pixels as an encoded TensorBlob. Raises InvalidInput, PayloadTooLarge, Overloaded."""
        try:
            answer = await self._pool.ask(data, tenant, len(data))
        except ChildLate as error:
            raise PayloadTooLarge(f"the image cannot be decoded: {error.message}") from error
        except ChildDied as error:
            raise PayloadTooLarge("the image needs more than decoding may take") from error
        kind, rest = answer[:1], answer[1:]
        if kind == PIXELS:
            return rest
        if kind == TOO_LARGE:
            raise PayloadTooLarge(rest.decode())
        if kind == INVALID:
            raise InvalidInput(rest.decode())
        raise ProtocolError(f"an unknown answer of a decoding process: {kind!r}")

    async def start(self) -> None:
        """Start the processes before the first image needs one. Raises Unavailable."""
        await self._pool.start()

    async def stop(self) -> None:
        """End every process."""
        await self._pool.stop()
