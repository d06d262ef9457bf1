"""Tower: a loaded encoder that takes and gives tensor blobs. Blocks; called from one thread."""

import sys
from typing import Final

import torch
from torch import nn

from tokenmesh.shared.errors import ProtocolError
from tokenmesh.shared.tensor_blob import TensorBlob

# Tensor blobs are little-endian, and torch's bytes are the host's.
assert sys.byteorder == "little"

_PIXELS: Final = "float32"
_DTYPE_NAMES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Tower:
    """One model's encoder on one device."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        dtype: torch.dtype,
        pixel_shape: tuple[int, ...],
        tokens_per_item: int,
        fingerprint: str,
    ) -> None:
        self._model = model
        self._device = device
        self._dtype = dtype
        self.pixel_shape = pixel_shape
        self.tokens_per_item = tokens_per_item
        self.fingerprint = fingerprint
        """Changes with every weight and setting that changes an embedding."""

    def check(self, pixels: TensorBlob) -> None:
        """Raise ProtocolError for pixels that the tower does not take."""
        if pixels.dtype != _PIXELS or pixels.shape != self.pixel_shape:
            raise ProtocolError(
                f"pixels are {pixels.dtype}{list(pixels.shape)}, the tower takes "
                f"{_PIXELS}{list(self.pixel_shape)}"
            )

    def encode(self, batch: list[TensorBlob]) -> list[TensorBlob]:
        """Embeddings [tokens_per_item, hidden] of each, in one forward pass."""
        # frombuffer wants writable memory; the copy also frees the message it is a view of.
        images = [
            torch.frombuffer(bytearray(pixels.data), dtype=torch.float32).view(pixels.shape)
            for pixels in batch
        ]
        with torch.inference_mode():
            stacked = torch.stack(images).to(device=self._device, dtype=self._dtype)
            embeddings = self._model(stacked).cpu().contiguous()
        return [
            TensorBlob(
                dtype=_DTYPE_NAMES[self._dtype],
                shape=tuple(one.shape),
                data=one.view(torch.uint8).numpy().tobytes(),
            )
            for one in embeddings
        ]
