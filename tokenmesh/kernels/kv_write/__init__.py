"""kv_write: store this step's keys and values into their pages.

pages  [2, blocks, kv_heads, page_size, head_dim]   keys in pages[0], values in pages[1]
keys_values  [tokens, 2 * kv_heads, head_dim]       each token's key heads, then its value heads
slots  [tokens, 2 * kv_heads]                       from `slot_rows`, once a step
"""

from tokenmesh.kernels.kv_write.cpu import kv_write, slot_rows
from tokenmesh.kernels.kv_write.reference import kv_write_reference

__all__ = ["kv_write", "kv_write_reference", "slot_rows"]
