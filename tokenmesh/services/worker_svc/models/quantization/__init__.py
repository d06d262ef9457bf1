"""Which modules of a checkpoint are quantized, and how."""

from tokenmesh.services.worker_svc.models.quantization.encoded import EncodedWeight, find_encoded
from tokenmesh.services.worker_svc.models.quantization.read import read_quantization
from tokenmesh.services.worker_svc.models.quantization.rules import Quantization

__all__ = ["EncodedWeight", "Quantization", "find_encoded", "read_quantization"]
