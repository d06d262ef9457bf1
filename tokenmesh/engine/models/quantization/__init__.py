"""Know which modules of a checkpoint are quantized, and how."""

from tokenmesh.engine.models.quantization.encoded import EncodedWeight, find_encoded
from tokenmesh.engine.models.quantization.read import read_quantization
from tokenmesh.engine.models.quantization.rules import Quantization

__all__ = ["EncodedWeight", "Quantization", "find_encoded", "read_quantization"]
