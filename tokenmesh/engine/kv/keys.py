"""Keys of blocks: hashes that stand for everything up to the end of a block."""

from tokenmesh.engine.kv.block_pool import NO_PARENT, block_packer, digest
from tokenmesh.engine.request.request import Request
from tokenmesh.shared.hashing import extra_keys_for_block
from tokenmesh.shared.tokens import BYTES_PER_ID, pack_ids


class BlockKeys:
    """Writes `hashes` of requests: of its parent's hash, the block's token ids and its extras.

    The key of a block of a window group is that hash and the group's mark.
    """

    def __init__(self, block_size: int, num_windowed: int, kv_code: str) -> None:
        """kv_code: the 8-bit type of the KV cache."""
        self.marks = [bytes([number + 1]) for number in range(num_windowed)]
        """The keys of each window group's blocks end with these."""
        self.block_size = block_size
        self._kv_code = kv_code
        self._pack = block_packer(block_size)

    def choose_side(self, request: Request) -> None:
        """Note on which side of the rope boundary it is, before KV is found or computed."""
        boundary = request.spec.rope_boundary
        is_long = boundary is not None and request.num_known > boundary
        if is_long != request.kv.is_long:
            request.kv.is_long = is_long
            # a new list, because the block log still refers to the old one
            request.kv.hashes = []

    def hash_up_to(self, request: Request, num_blocks: int) -> None:
        """Have the hashes of the first blocks, all of whose tokens are known."""
        size, hashes = self.block_size, request.kv.hashes
        ids = request.token_ids[len(hashes) * size : num_blocks * size]
        # every stream does this at the end of every block, a long prompt for hundreds at once
        packed = self._pack(*ids) if len(ids) == size else pack_ids(ids)
        spec, num_bytes = request.spec, size * BYTES_PER_ID
        has_extras = spec.has_block_extras or request.kv.is_long or bool(self._kv_code)
        salt = request.block_salt if has_extras else None
        parent = hashes[-1] if hashes else NO_PARENT
        for place in range(0, len(packed), num_bytes):
            block = packed[place : place + num_bytes]
            if has_extras:
                span = len(hashes) * size, (len(hashes) + 1) * size
                block += extra_keys_for_block(
                    *span,
                    lora=spec.lora,
                    salt=salt,
                    media=spec.media,
                    kv_code=self._kv_code,
                    embeds=request.prepared.embeds_keys,
                )
            parent = digest(parent + block)
            hashes.append(parent)
