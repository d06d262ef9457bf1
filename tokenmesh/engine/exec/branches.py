"""Branches: chains of drafts that part from the first chain of their row.

Two drafts for the same position have keys of their own, and attention sees all keys of a block
table before a token. So each further chain has a table of its own: the row's blocks up to the last
known token, and behind them blocks that belong to no row. It computes the last known token again.
Where a row draws what such a chain drafted, the blocks are copied into the row's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tokenmesh.engine.exec.rows import HostRows
from tokenmesh.engine.models.kv_store import KvStore
from tokenmesh.engine.plan import ScheduledRow
from tokenmesh.shared.config.draft_tree import DraftTree, chains_of


class Branch(ScheduledRow, gc=False):
    """A chain of drafts of a row, with another table."""

    table: int = 0


def table_of(entry: ScheduledRow) -> int:
    """Return the number of its block table."""
    return entry.table if isinstance(entry, Branch) else entry.row


def blocks_of_chain(depth: int, page_size: int) -> int:
    """Blocks that hold the last known token and so many drafts, wherever these begin."""
    return -(-(page_size + depth) // page_size)


def num_tables(tree: DraftTree | None, num_rows: int) -> int:
    """Tables of further chains of so many rows."""
    return 0 if tree is None else num_rows * (tree.num_chains - 1)


@dataclass(slots=True)
class Branches:
    """The tables and blocks of further chains. The tables are behind those of rows, the blocks
    behind those of the pool."""

    store: KvStore
    rows: HostRows
    tree: DraftTree
    first_table: int
    first_block: int
    _free: list[int] = field(default_factory=list)
    """Tables of the step at hand."""
    _chains: dict[int, list[tuple[int, ScheduledRow]]] = field(default_factory=dict)
    """Each row has its chains of the step at hand here, with their tables."""

    def spread(self, scheduled: Sequence[ScheduledRow]) -> list[ScheduledRow]:
        """Make entries of chains from those whose drafts branch, and prepare their blocks."""
        self._chains.clear()
        self._free = list(range(self.first_table, len(self.rows.tables)))
        spread = []
        for entry in scheduled:
            if not entry.parents:
                spread.append(entry)
                continue
            chains = [[entry.drafts[n] for n in chain] for chain in chains_of(entry.parents)]
            assert entry.num_tokens == 1, "streams decode before they have drafts"
            row, start = entry.row, entry.start
            found = [ScheduledRow(row, start, 1, [], entry.samples, drafts=chains[0])]
            for drafts in chains[1:]:
                table = self._free.pop()
                self._prepare(row, table, start)
                found.append(Branch(row, start, 1, [], False, drafts=drafts, table=table))
            self._chains[entry.row] = [(table_of(each), each) for each in found]
            spread += found
        return spread

    @torch.inference_mode()
    def settle(self, tokens: Mapping[int, list[int]]) -> dict[int, int]:
        """Copy the chains that rows followed into their blocks; by row the table of the chain, for
        those that did not follow their first one."""
        taken = {}
        for row, chains in self._chains.items():
            right = tokens.get(row, [0])[:-1]
            table, entry = next(
                (table, each) for table, each in chains if each.drafts[: len(right)] == right
            )
            if table == row or not right:
                continue
            size, last = self.store.page_size, entry.start + len(right)
            places = slice(entry.start // size, last // size + 1)
            self.store.copy_blocks(self.rows.tables[table, places], self.rows.tables[row, places])
            taken[row] = table
        return taken

    def _prepare(self, row: int, table: int, last: int) -> None:
        """Let a table be the row's up to its last known token, which is computed there."""
        tables, size = self.rows.tables, self.store.page_size
        shared, filled = divmod(last, size)
        count = blocks_of_chain(self.tree.depth_of(len(self.tree.paths)), size)
        first = self.first_block + (table - self.first_table) * count
        count = min(count, tables.shape[1] - shared)
        tables[table] = tables[row]
        tables[table, shared : shared + count] = torch.arange(first, first + count)
        if filled:
            own = slice(shared, shared + 1)
            self.store.copy_blocks(tables[row, own], tables[table, own])
