"""logprobs: log-probabilities of drawn tokens and of the most likely ones, for some rows.

logits   [N, V]   float32, float16 or bfloat16, as the model computed them; only read
indices  [A] int32  the rows of logits that need them
tokens   [N] int64  the token of each row of logits
num_top  how many alternatives
returns  Logprobs of the A rows

Other rows cost nothing. Results stay on the device, and the host does not wait for them.
"""

import torch

from tokenmesh.kernels.dispatch import uses_triton
from tokenmesh.kernels.logprobs.answer import Logprobs
from tokenmesh.kernels.logprobs.reference import TOLERANCE, logprobs_reference

__all__ = ["TOLERANCE", "Logprobs", "logprobs", "logprobs_reference"]


def logprobs(
    logits: torch.Tensor, indices: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> Logprobs:
    """The results are new tensors."""
    if uses_triton(logits):
        from tokenmesh.kernels.logprobs import triton

        return triton.logprobs(logits, indices, tokens, num_top)
    return logprobs_reference(logits, indices, tokens, num_top)
