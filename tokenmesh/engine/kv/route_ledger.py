"""The route ledger: which route blocks a worker has, as changes for the mesh's prefix index."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import xxhash

from tokenmesh.engine.kv.block_pool import block_packer
from tokenmesh.engine.request.request import Request
from tokenmesh.shared.hashing import Adapter, extra_keys_for_block

_GONE: Final = False

_THERE: Final = True


@dataclass(slots=True)
class RouteChange:
    """It holds what has changed since the last one; the order within it does not matter."""

    is_cleared: bool = False
    """Nothing from before is there any more."""
    is_there: dict[bytes, bool] = field(default_factory=dict)
    """By route hash, 8 bytes little-endian as in `shared.hashing`."""


class RouteLedger:
    """Follows which blocks can be found, and derives route blocks from them."""

    def __init__(
        self, is_there: Callable[[bytes], object], block_size: int, route_block_tokens: int
    ) -> None:
        """is_there: true of the hash of a block that a hit can use. A route block must be a whole
        number of engine blocks."""
        if route_block_tokens % block_size:
            raise ValueError(f"{route_block_tokens} is not a multiple of {block_size}")
        self._is_there = is_there
        self._size = route_block_tokens
        self._pack = block_packer(route_block_tokens)
        self._ratio = route_block_tokens // block_size
        self._blocks_by_route: dict[bytes, tuple[bytes, ...]] = {}
        self._routes_by_block: dict[bytes, set[bytes]] = {}
        """Several where prompts part within a route block."""
        self._change = RouteChange()

    @property
    def routes(self) -> frozenset[bytes]:
        """Every route block that is there."""
        return frozenset(self._blocks_by_route)

    def note(self, request: Request, end: int) -> None:
        """The request's blocks up to position `end` were registered, or were there before."""
        if not request.spec.route_head:
            return
        for index in range(request.kv.num_routed, end // self._size):
            route = self._route_hash(request, index)
            blocks = tuple(request.kv.hashes[index * self._ratio : (index + 1) * self._ratio])
            if route not in self._blocks_by_route and self._are_found(blocks):
                self._add(route, blocks)
            request.kv.num_routed = index + 1

    def forget(self, block_hash: bytes) -> None:
        """A block can no longer be found, nor can the route blocks that it was a part of."""
        found = self._routes_by_block.get(block_hash)
        if not found:
            return
        for route in tuple(found):
            for each in self._blocks_by_route.pop(route):
                routes = self._routes_by_block[each]
                routes.remove(route)
                if not routes:
                    del self._routes_by_block[each]
            self._change.is_there[route] = _GONE

    def forget_all(self) -> None:
        """Nothing can be found any more."""
        self._blocks_by_route.clear()
        self._routes_by_block.clear()
        self._change = RouteChange(is_cleared=True)

    def take_change(self) -> RouteChange | None:
        """Return what is new since the last call; None: nothing."""
        change = self._change
        if not change.is_there and not change.is_cleared:
            return None
        self._change = RouteChange()
        return change

    def _are_found(self, blocks: tuple[bytes, ...]) -> bool:
        return all(map(self._is_there, blocks))

    def _add(self, route: bytes, blocks: tuple[bytes, ...]) -> None:
        self._blocks_by_route[route] = blocks
        for block in blocks:
            self._routes_by_block.setdefault(block, set()).add(route)
        self._change.is_there[route] = _THERE

    def _route_hash(self, request: Request, index: int) -> bytes:
        """As `shared.hashing.route_hashes` computes it; kept for the next time."""
        hashes = request.kv.route_hashes
        while len(hashes) <= index:
            hashes.append(self._next_hash(request, len(hashes)))
        return hashes[index]

    def _next_hash(self, request: Request, index: int) -> bytes:
        start, end = index * self._size, (index + 1) * self._size
        # the wire is little-endian, the chain is over xxhash's own big-endian digests
        parent = request.kv.route_hashes[-1][::-1] if index else request.spec.route_head
        block = parent + self._pack(*request.token_ids[start:end])
        spec = request.spec
        if spec.lora is not None or spec.route_salt is not None or spec.media:
            lora = None if spec.lora is None else Adapter(spec.lora.name)
            block += extra_keys_for_block(
                start, end, lora=lora, salt=spec.route_salt, media=spec.media
            )
        return xxhash.xxh3_64_digest(block)[::-1]
