"""The specification of lora, in float64."""

import torch

from tokenmesh.kernels.lora.weights import AdapterRows


def lora_reference(
    x: torch.Tensor, out: torch.Tensor, number: int, rows: AdapterRows
) -> torch.Tensor:
    """out [T, O] with what the adapters of the step add, rounded once to its dtype."""
    total = out.double()
    for adapter, tokens in zip(rows.adapters, rows.tokens, strict=True):
        for part in adapter.parts.get(number, ()):
            added = x[list(tokens)].double() @ part.a.double().t() @ part.b.double()
            total[list(tokens), part.first : part.first + part.b.shape[1]] += added
    return total.to(out.dtype)
