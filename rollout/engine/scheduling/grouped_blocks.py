"""Block tables of several groups of layers, of which some forget what a window has left behind.

    a sequence of a model with windows of 6 and blocks of 4, at position 13:

      full      [ 0 1 2 3 ][ 4 5 6 7 ][ 8 9 10 11 ][ 12 13 . . ]     held, all
      window 6    given back            [ 8 9 10 11 ][ 12 13 . . ]    held: 8 .. 13 are in reach

A page fits any group, so all take theirs from one pool: a short sequence takes one for each group,
a long one more for the full ones alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rollout.config import EngineConfig
from rollout.engine.scheduling.block_manager import BlockManager, PrefixHit, chained
from rollout.engine.scheduling.state_slots import StateSlots
from rollout.engine.sequences.sequence import Sequence as Request
from rollout.models.decoder.kv_groups import KVGroup


class GroupedBlockManager(BlockManager):
    """``BlockManager`` of a model whose layers differ in how far they reach, or all forget.

    ``groups``: of each table, those that keep every position last; ``ahead``: the most tokens of a
    sequence that one step computes. What a step of it will read or write is held: all known
    positions in full groups, the others as far as ``admit``, ``cut`` and ``grow`` have said.

    A prefix is known where full groups have all its blocks, and the others those that the next
    position reads. Blocks that a window has left can be found until they are reused.
    """

    slides = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Sequence[KVGroup],
        *,
        ahead: int,
        salt: int = 0,
        prefix_caching: bool = True,
    ) -> None:
        super().__init__(num_blocks, block_size, salt=salt, prefix_caching=prefix_caching)
        self.groups, self._ahead = groups, ahead
        self._forgetful = sum(group.forgets for group in groups)
        self._kinds: dict[tuple[int, int], list[int]] = {}  # groups that forget, by their reach
        for index, group in enumerate(groups[: self._forgetful]):
            self._kinds.setdefault((group.window, group.chunk), []).append(index)

    def find(self, seq: Request) -> PrefixHit:
        parent = root = self._root_of(seq)
        if not root or seq.block_table:
            return PrefixHit([])
        known: list[list[int]] = [[] for _ in self.groups]  # -1: not there
        for index, digest in enumerate(self._chain(seq, root)):
            found = [self._block_of(digest, i, seq, index, parent) for i in range(len(self.groups))]
            if -1 in found[self._forgetful :]:
                break
            for blocks, block in zip(known, found, strict=True):
                blocks.append(block)
            parent = digest
        count = self._longest(known)
        gone = self._gone_at(count * self.block_size)
        tables = [[0] * n + blocks[n:count] for n, blocks in zip(gone, known, strict=True)]
        digest = seq.digests[count - 1] if count else b""
        missing = seq.digests[count] if count < seq.cacheable // self.block_size else b""
        return PrefixHit(tables[0], missing, None, 0, tuple(tables), tuple(gone), digest)

    def admit(self, seq: Request, found: PrefixHit, margin: int = 0) -> bool:
        hits, size = bool(found.blocks), self.block_size
        tables = [list(t) for t in found.tables] if hits else list(_tables(seq))
        tables = tables or [[] for _ in self.groups]
        gone = list(found.gone if hits else seq.gone or [0] * len(tables))
        taken = [b for n, t in zip(gone, tables, strict=True) for b in t[n:]] if hits else []
        idle = sum(self._blocks[b].ref_count == 0 for b in taken)
        need = [end - len(table) for end, table in zip(self._ends(seq, gone), tables, strict=True)]
        margin = min(margin * len(tables), self.num_blocks // 32)  # of those that run, a block each
        if sum(need) + idle + margin > len(self._free):
            return False
        if hits:
            for block in taken:
                self._take(block)
            seq.advance(len(found.blocks) * size, self.version_of(seq))
            seq.hashed_blocks, seq.chain_hash = len(found.blocks), found.digest
        seq.block_table, *seq.more_tables = tables
        seq.gone = gone
        if seq.num_cached_tokens < 0:
            seq.num_cached_tokens = seq.num_computed
            self.query_tokens += seq.num_tokens
            self.hit_tokens += seq.num_computed
        self._extend(tables, need)
        return True

    def cut(self, seq: Request, count: int) -> int:
        """Up to what there are blocks for; 0: it has to wait for some."""
        short = self._blocks_for(seq.num_computed + count) - len(seq.block_table)
        if short <= 0:
            return count
        room = min(short, len(self._free) // self._forgetful)
        self._extend([*_tables(seq)][: self._forgetful], [room] * self._forgetful)
        return min(count, len(seq.block_table) * self.block_size - seq.num_computed)

    def grow(self, seq: Request, coming: int = 0) -> bool:
        tables, blocks = [*_tables(seq)], self._blocks_for(seq.num_tokens + coming)
        need = [max(0, blocks - len(table)) for table in tables]
        if sum(need) > len(self._free):
            return False
        self._extend(tables, need)
        return True

    def shrink(self, seq: Request) -> None:
        count = self._blocks_for(seq.num_tokens)
        for table in _tables(seq):
            self._give_back(table[count:])
            del table[count:]

    def slide(self, seq: Request) -> None:
        """Give back what no window reaches from the next position on; after each of its steps.

        What its other samples are to go on from stays until they have it.
        """
        position, size = seq.num_computed, self.block_size
        if seq.forks:
            position = min(position, self._prompt_end(seq))
        for alike in self._kinds.values():
            first = self.groups[alike[0]].first(position) // size
            if not seq.gone or first <= seq.gone[alike[0]]:
                continue
            tables = [*_tables(seq)]
            for index in alike:
                self._give_back(tables[index][seq.gone[index] : first])
                seq.gone[index] = first

    def _lasting(self, seq: Request) -> list[int]:
        *_, last = _tables(seq)
        return last

    def fork(self, parent: Request, child: Request) -> None:
        assert not child.block_table
        count = self._prompt_end(child) // self.block_size
        gone = self._gone_at(count * self.block_size)
        if not count or any(have > need for have, need in zip(parent.gone, gone, strict=True)):
            return
        tables = [[0] * n + t[n:count] for n, t in zip(gone, _tables(parent), strict=True)]
        for n, table in zip(gone, tables, strict=True):
            for block in table[n:]:
                self._take(block)
        if child.experts is not None and parent.experts is not None:
            child.experts.take_prefix(parent.experts, count * self.block_size)
        child.block_table, *child.more_tables = tables
        child.gone = gone
        child.num_computed = count * self.block_size
        child.kv_spans = parent.kv_spans.prefix(child.num_computed)
        if parent.hashed_blocks == count:
            child.hashed_blocks, child.chain_hash = count, parent.chain_hash
        elif parent.hashed_blocks == count + 1:
            child.hashed_blocks = count
            child.chain_hash = self._blocks[parent.block_table[count]].parent

    def _hash_blocks(self, seq: Request, parent: bytes, full: int) -> bytes:
        tables = [*_tables(seq)]
        for index in range(seq.hashed_blocks, full):
            start = index * self.block_size
            tokens = seq.cache_ids(start, start + self.block_size)
            digest = chained(parent, tokens)
            for group, table in enumerate(tables):
                if index < seq.gone[group]:
                    continue
                block = self._blocks[table[index]]
                block.tokens, block.parent = tokens, parent
                block.hash = _address(digest, group)
                self._by_hash.setdefault(block.hash, table[index])
            parent = digest
        return parent

    def release(self, seq: Request) -> None:
        for gone, table in zip(seq.gone, _tables(seq), strict=True):
            self._give_back(table[gone:])
        seq.forget_kv()

    def check_integrity(self, sequences: Iterable[Request]) -> None:
        held: Counter[int] = Counter()
        for seq in sequences:
            tables = [*_tables(seq)]
            own = [b for gone, table in zip(seq.gone, tables, strict=True) for b in table[gone:]]
            assert len(set(own)) == len(own), f"{seq}: a block twice"
            assert seq.kv_spans.length == seq.num_computed, f"{seq}: spans do not cover its KV"
            if tables:
                least = self._blocks_for(seq.num_computed)
                assert min(map(len, tables)) == len(seq.block_table) >= least, f"{seq}: too few"
                most = self._gone_at(seq.num_computed)
                assert all(a <= b for a, b in zip(seq.gone, most, strict=True)), f"{seq}: too far"
            held.update(own)
        self._check_books(held)

    def _check_address(self, block_id: int) -> None:
        block = self._blocks[block_id]
        digest = chained(block.parent, block.tokens)
        assert block.hash[:-1] == digest, f"block {block_id}: another hash"

    def _ends(self, seq: Request, gone: Sequence[int]) -> list[int]:
        """Up to which block each table of a sequence to admit goes."""
        tokens, size = seq.num_tokens, self.block_size
        most = [group.blocks(tokens, self._ahead, size) for group in self.groups]
        whole = self._blocks_for(tokens)
        few = self._forgetful  # as far as each may: all have equal tables
        end = min(whole, *(n + m for n, m in zip(gone[:few], most[:few], strict=True)))
        return [end] * few + [whole] * (len(self.groups) - few)

    def _gone_at(self, position: int) -> list[int]:
        """How many blocks of each group are out of reach from ``position`` on."""
        return [group.first(position) // self.block_size for group in self.groups]

    def _longest(self, known: Sequence[Sequence[int]]) -> int:
        """The most blocks of a prefix whose end every group that forgets can be read from."""
        few = self._forgetful
        since = []  # of each such group and block: where the known ones begin that end there
        for blocks in known[:few]:
            begins = 0
            since.append([begins := i + 1 if b < 0 else begins for i, b in enumerate(blocks)])
        for count in range(len(known[0]), 0, -1):
            firsts = self._gone_at(count * self.block_size)
            if all(have[count - 1] <= n for have, n in zip(since, firsts[:few], strict=True)):
                return count
        return 0

    def _block_of(self, digest: bytes, group: int, seq: Request, index: int, parent: bytes) -> int:
        """Block ``index`` of a sequence, of a group; -1 where it is not there."""
        block_id = self._by_hash.get(_address(digest, group), -1)
        found = block_id >= 0 and self._holds(block_id, seq, index, parent)
        return block_id if found else -1

    def _extend(self, tables: Iterable[list[int]], counts: Iterable[int]) -> None:
        for table, count in zip(tables, counts, strict=True):
            table.extend(self._allocate() for _ in range(count))


def _tables(seq: Request) -> Iterator[list[int]]:
    """Of each group; none while it holds nothing."""
    if seq.gone:
        yield seq.block_table
        yield from seq.more_tables


def _address(digest: bytes, group: int) -> bytes:
    return digest + bytes((group,))


def make_block_manager(
    config: EngineConfig,
    num_blocks: int,
    groups: Sequence[KVGroup],
    salt: int,
    states: StateSlots | None,
) -> BlockManager:
    """The one that a model's ``groups`` of layers need."""
    size, caching = config.block_size, config.enable_prefix_caching
    if len(groups) == 1 and not groups[0].forgets:
        return BlockManager(num_blocks, size, salt=salt, prefix_caching=caching, states=states)
    assert states is None, "a model with recurrent states has one group"
    ahead = config.max_num_batched_tokens
    return GroupedBlockManager(
        num_blocks, size, groups, ahead=ahead, salt=salt, prefix_caching=caching
    )
