"""merged: two attentions of the same queries over different keys, made into one by their lse."""

import torch


def merged(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, heads * head_dim] and [tokens, heads] twice become the same of all keys."""
    lse = torch.logaddexp(first_lse, second_lse)
    sides = ((first, first_lse), (second, second_lse))
    parts = [x.view(*lse.shape, -1) * (side - lse).exp().unsqueeze(-1) for x, side in sides]
    return (parts[0] + parts[1]).flatten(1), lse
