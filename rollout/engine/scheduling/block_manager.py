"""Which KV block holds which positions of which sequence, and which blocks can be found again.

Source of the scheme: hash-block prefix caching as in vLLM and nano-vLLM. A full block's hash is
``H(parent's hash, its tokens)``; a chain starts from a ``CacheRoot``, so that KV computed by other
weights can never match. A freed block stays addressable until it is reused.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

from rollout.engine.scheduling.cache_root import CacheRoot
from rollout.engine.scheduling.state_slots import StateSlots
from rollout.engine.sequences.sequence import Sequence
from rollout.engine.sequences.snapshot import Snapshot

_DIGEST_BYTES = 16


class Block:
    """One page: how many block tables hold it and, when hashed, its place in a chain.

    ``drafted``: a draft model has computed its positions, too.
    """

    __slots__ = ("drafted", "hash", "parent", "ref_count", "tokens")

    def __init__(self) -> None:
        self.ref_count = 0
        self.drafted = False
        self.forget()

    def forget(self) -> None:
        self.hash = b""
        self.parent = b""
        self.tokens: tuple[int, ...] = ()


class PrefixHit(NamedTuple):
    """What the cache has of a sequence that holds no block.

    Where there are recurrent states, up to the last ``snapshot``; ``known`` blocks in all. Where
    layers have groups: the ``tables`` of all, whose first is ``blocks``, how many blocks of each
    are ``gone``, and the ``digest`` of the last.
    """

    blocks: list[int]
    missing: bytes = b""  # by what the next block would be found, if another one may be
    snapshot: Snapshot | None = None
    known: int = 0
    tables: tuple[list[int], ...] = ()
    gone: tuple[int, ...] = ()
    digest: bytes = b""


class BlockManager:
    """Bookkeeping of ``num_blocks`` pages of ``block_size`` positions; touches no tensor.

    A prefix hit never covers a sequence's last token, so that at least one is computed, nor what
    follows ``Sequence.cacheable`` positions: their logits are wanted. Only
    blocks whose whole chain, from position 0 on, was computed by one version are hashed.
    ``states``: of a model that has recurrent states, too; a sequence has both or neither.
    """

    slides = False  # whether blocks are given back while a sequence goes on: by ``slide``

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        salt: int = 0,
        prefix_caching: bool = True,
        states: StateSlots | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.states = states
        self.query_tokens = 0
        self.hit_tokens = 0
        self._salt = salt
        self._blocks = [Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[bytes, int] = {}
        self._chains = 0
        self._pinned_roots: _Roots | None = None  # of what finishes on the version before
        self._start_from(CacheRoot(version=0))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1.0 - len(self._free) / self.num_blocks

    @property
    def version(self) -> int:
        return self.root.version

    def version_of(self, seq: Sequence) -> int:
        """Of the weights that compute its KV."""
        return self.version if seq.pin is None else seq.pin

    def chain_of(self, version: int) -> int:
        """Of steps by the weights of ``version``, the live one or the pinned one: another number
        whenever nothing found before may be found again.
        """
        return self._chains if version == self.version else -self._chains

    def set_version(self, version: int, *, pin: bool = False) -> None:
        """Switch the weights' version: only KV it computes from now on matches.

        ``pin``: sequences pinned to the version until now go on finding its KV, until ``unpin``.
        """
        self._pinned_roots = self._roots if pin else None
        self._start_from(replace(self.root, version=version))

    def unpin(self) -> None:
        """No sequence is pinned any more."""
        self._pinned_roots = None

    def reset_prefix_cache(self) -> None:
        """Nothing computed before this call is found again."""
        self._by_hash.clear()
        for block in self._blocks:
            if not block.ref_count:  # a held one's hash goes on in chains of the roots before
                block.forget()
        self._pinned_roots = None  # what is pinned finds nothing any more
        self._start_from(self.root)

    def find(self, seq: Sequence) -> PrefixHit:
        """The cached blocks of the longest known prefix; tokens are compared after each hit."""
        hits: list[int] = []
        parent = root = self._root_of(seq)
        if not root or seq.block_table:
            return PrefixHit(hits)
        missing = b""
        for index, digest in enumerate(self._chain(seq, root)):
            block_id = self._by_hash.get(digest)
            if block_id is None:
                missing = digest
                break
            if not self._holds(block_id, seq, index, parent):
                break
            hits.append(block_id)
            parent = digest
        if self.states is None:
            return PrefixHit(hits, missing)
        count, snapshot = self.states.nearest(seq.digests[: len(hits)])
        return PrefixHit(hits[:count], missing, snapshot, len(hits))

    def admit(self, seq: Sequence, found: PrefixHit, margin: int = 0) -> bool:
        """Give ``seq`` blocks for all its known tokens, reusing cached ones, or change nothing.

        ``found``: what ``find`` has just said; those positions count as computed. ``margin`` blocks
        must stay free.
        """
        hits = list(found.blocks)
        kept = len(hits) or len(seq.block_table)
        idle = sum(self._blocks[b].ref_count == 0 for b in hits)
        need = self._blocks_for(seq.num_tokens) - kept
        if need + idle + margin > len(self._free):
            return False
        if hits:
            for block in hits:
                self._take(block)
            seq.block_table = hits
            seq.advance(kept * self.block_size, self.version_of(seq))
            seq.hashed_blocks = kept
            seq.chain_hash = self._blocks[hits[-1]].hash
        if seq.num_cached_tokens < 0:
            seq.num_cached_tokens = seq.num_computed
            self.query_tokens += seq.num_tokens
            self.hit_tokens += seq.num_computed
        seq.block_table.extend(self._allocate() for _ in range(need))
        if self.states is not None:
            seq.branch = found.known if found.known > len(found.blocks) else 0
            self.states.admit(seq, found.snapshot)
            if seq.forks and found.snapshot and seq.num_computed == self._prompt_end(seq):
                self.states.hold(seq, found.snapshot)
        return True

    def cut(self, seq: Sequence, count: int) -> int:
        """How many of its next ``count`` tokens a step computes: up to where a snapshot is due.

        That it is made then is planned here, and booked by ``book_state``.
        """
        if self.states is None:
            return count
        point = self.next_snapshot(seq)
        if point > seq.num_computed + count:
            self.states.drop_plan(seq)  # of a step that went on without ``seq``
            return count
        self.states.plan(seq)
        return point - seq.num_computed

    def next_snapshot(self, seq: Sequence, coming: int = 0) -> int:
        """After which position the next snapshot is due, ``coming`` tokens from now; see
        ``state_slots``."""
        done, points = seq.num_computed + coming, []
        if self.states is None or not self.states.num_snapshots:
            return sys.maxsize
        version = self.version_of(seq)
        if self.prefix_caching and (not done or seq.kv_spans.single_version() == version):
            every = self.states.every * self.block_size
            points += [(done // every + 1) * every, seq.branch * self.block_size]
        if points or seq.forks:
            points.append(self._prompt_end(seq))
        return min((point for point in points if point > done), default=sys.maxsize)

    def book_state(self, seq: Sequence) -> None:
        """A step is over that restored or saved the state of ``seq``; comes after ``publish``."""
        assert self.states is not None
        hashed = seq.hashed_blocks * self.block_size == seq.num_computed
        forks = seq.forks and seq.num_computed == self._prompt_end(seq)
        self.states.book(seq, seq.chain_hash if hashed else b"", forks)

    def grow(self, seq: Sequence, coming: int = 0) -> bool:
        """Make room for all known and ``coming`` tokens, or change nothing and say False."""
        need = self._blocks_for(seq.num_tokens + coming) - len(seq.block_table)
        if need > len(self._free):
            return False
        for _ in range(need):
            seq.block_table.append(self._allocate())
        return True

    def draft_room(self, seq: Sequence, count: int) -> int:
        """How many drafts may follow the ``count`` tokens that a step computes of ``seq``: none of
        them is behind a snapshot, of which nobody knew then whether it holds.
        """
        if self.states is None:
            return sys.maxsize
        if seq.restoring is not None or seq.saving is not None:
            return 0
        return max(0, self.next_snapshot(seq) - seq.num_computed - count - 1)

    def begin_drafts(self, seq: Sequence, known: int, drafts: int) -> bool:
        """Make room for ``drafts`` behind the ``known`` tokens of a step, or change nothing and say
        False.
        """
        stop = seq.num_computed + known + drafts
        if self.states is not None and not self.states.begin_trial(seq, stop):
            return False
        if self.grow(seq, coming=drafts):
            return True
        if self.states is not None:
            self.states.end_trial(seq, keep=False)
        return False

    def end_drafts(self, seq: Sequence) -> None:
        """A step with drafts is booked. Where some were wrong a recurrent state is what it was
        before that step, and the tokens of it that are known now are computed again: they are in
        no block that others may find.
        """
        self.shrink(seq)
        trial = seq.trial
        if self.states is None or trial is None:
            return
        right = seq.num_computed == trial.stop
        self.states.end_trial(seq, keep=right)
        if right:
            self.publish(seq)
        else:
            seq.go_back(trial.start)

    def shrink(self, seq: Sequence) -> None:
        """Give back the blocks behind all known tokens, which were for drafts."""
        count = self._blocks_for(seq.num_tokens)
        self._give_back(seq.block_table[count:])
        del seq.block_table[count:]

    def drafted_until(self, seq: Sequence) -> int:
        """Up to where a draft model has what it needs of ``seq``, but for its last token: by steps
        of ``seq``, or of others that it shares blocks with.
        """
        table, index = self._lasting(seq), seq.num_drafted // self.block_size
        count = min(len(table), (seq.num_tokens - 1) // self.block_size)
        while index < count and self._blocks[table[index]].drafted:
            index += 1
        return max(seq.num_drafted, index * self.block_size)

    def note_drafted(self, seq: Sequence, context: range) -> None:
        """The step that is made computes ``context`` of ``seq`` by a draft model."""
        table, size = self._lasting(seq), self.block_size
        # What was drafted and right since the last one may have completed a block before it.
        for index in range(max(0, context.start // size - 1), context.stop // size):
            self._blocks[table[index]].drafted = True

    def forget_drafted(self) -> None:
        """A step has failed, and may not have computed what was noted."""
        for block in self._blocks:
            block.drafted = False

    def _lasting(self, seq: Sequence) -> list[int]:
        """The blocks by which a draft model goes: of every position."""
        return seq.block_table

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share the parent's full prompt blocks, all but the prompt's last token, with ``child``.

        The rest of the prompt is computed again by the child, from the state that the parent holds
        where there are states. The parent has computed its prompt.
        """
        assert not child.block_table
        count = self._prompt_end(child) // self.block_size
        if not count:
            return
        if self.states is not None:
            if parent.held_state is None:
                return  # there was no slot to save it in: the child computes all
            self.states.hold(child, parent.held_state)
        child.block_table = parent.block_table[:count]
        if child.experts is not None and parent.experts is not None:
            child.experts.take_prefix(parent.experts, count * self.block_size)
        for block in child.block_table:
            self._take(block)
        child.num_computed = count * self.block_size
        child.kv_spans = parent.kv_spans.prefix(child.num_computed)
        child.hashed_blocks = min(count, parent.hashed_blocks)
        if child.hashed_blocks:
            child.chain_hash = self._blocks[child.block_table[child.hashed_blocks - 1]].hash

    def publish(self, seq: Sequence) -> None:
        """Make newly full blocks of ``seq`` addressable; called after each of its steps."""
        full = seq.num_computed // self.block_size
        root = self._root_of(seq)
        if full == seq.hashed_blocks or not root:
            return
        if seq.kv_spans.single_version() != self.version_of(seq):
            return
        seq.chain_hash = self._hash_blocks(seq, seq.chain_hash or root, full)
        seq.hashed_blocks = full

    def _hash_blocks(self, seq: Sequence, parent: bytes, full: int) -> bytes:
        """Of those before ``full`` the ones that have no hash yet, behind ``parent``'s; the last
        one's.
        """
        for index in range(seq.hashed_blocks, full):
            block_id = seq.block_table[index]
            block = self._blocks[block_id]
            start = index * self.block_size
            block.tokens = seq.cache_ids(start, start + self.block_size)
            block.parent = parent
            block.hash = parent = chained(parent, block.tokens)
            self._by_hash.setdefault(parent, block_id)
        return parent

    def next_digest(self, seq: Sequence) -> bytes | None:
        """By what ``publish`` will make the next full block of ``seq`` addressable, if it will."""
        start = seq.hashed_blocks * self.block_size
        known = seq.cache_ids(start, start + self.block_size)
        root = self._root_of(seq)
        if not root or len(known) < self.block_size:
            return None
        if seq.num_computed and seq.kv_spans.single_version() != self.version_of(seq):
            return None
        return chained(seq.chain_hash or root, known)

    def release(self, seq: Sequence) -> None:
        """Give back every block of ``seq`` and forget its KV; hashed blocks stay addressable."""
        self._give_back(seq.block_table)
        if self.states is not None:
            self.states.release(seq)
        seq.forget_kv()

    def slide(self, seq: Sequence) -> None:
        """Give back the blocks of ``seq`` that no layer reads again; here they are all read."""

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the books agree with the tables of all live sequences."""
        held: Counter[int] = Counter()
        live = list(sequences)
        if self.states is not None:
            self.states.check_integrity(live)
        for seq in live:
            assert len(set(seq.block_table)) == len(seq.block_table), f"{seq}: a block twice"
            assert len(seq.block_table) >= self._blocks_for(seq.num_computed), f"{seq}: too few"
            assert seq.kv_spans.length == seq.num_computed, f"{seq}: spans do not cover its KV"
            held.update(seq.block_table)
        self._check_books(held)

    def _check_books(self, held: Counter[int]) -> None:
        """``held``: how often each block is in a table."""
        for block_id, block in enumerate(self._blocks):
            assert block.ref_count == held[block_id], f"block {block_id}: wrong reference count"
            assert (block_id in self._free) == (block.ref_count == 0), f"block {block_id}: free?"
            if block.hash:
                self._check_address(block_id)
        for digest, block_id in self._by_hash.items():
            assert self._blocks[block_id].hash == digest, f"block {block_id}: stale address"

    def _check_address(self, block_id: int) -> None:
        block = self._blocks[block_id]
        digest = chained(block.parent, block.tokens)
        assert block.hash == digest, f"block {block_id}: another hash"

    def _start_from(self, root: CacheRoot) -> None:
        self._chains += 1
        if self.states is not None:
            self.states.forget()
        self.root = root
        self._roots = _Roots(root, self._salt, self._chains)

    def _root_of(self, seq: Sequence) -> bytes:
        """What the chain of a sequence's blocks starts from; empty where it may have none."""
        roots = self._roots if seq.pin is None else self._pinned_roots
        if roots is None or not (self.prefix_caching and seq.shares_kv):
            return b""
        return roots.of(seq.adapter_name)

    def _chain(self, seq: Sequence, root: bytes) -> Iterator[bytes]:
        """The hashes from ``root`` on of the blocks that may come from the cache.

        What was asked for stays in ``digests``: a sequence that waits is hashed once, however often
        it is looked up.
        """
        if seq.digests_root != root:
            seq.digests_root, seq.digests = root, []
        known, size, count = seq.digests, self.block_size, seq.cacheable // self.block_size
        yield from known[:count]
        for start in range(len(known) * size, count * size, size):
            tokens = seq.cache_ids(start, start + size)
            known.append(chained(known[-1] if known else root, tokens))
            yield known[-1]

    def _holds(self, block_id: int, seq: Sequence, index: int, parent: bytes) -> bool:
        """Whether a block found by its hash is block ``index`` of ``seq``, behind ``parent``."""
        block, start = self._blocks[block_id], index * self.block_size
        tokens = seq.cache_ids(start, start + self.block_size)
        return block.tokens == tokens and block.parent == parent

    def _allocate(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self._blocks[block_id]
        if block.hash:
            if self._by_hash.get(block.hash) == block_id:
                del self._by_hash[block.hash]
                if self.states is not None:
                    self.states.forget(block.hash)
            block.forget()
        block.ref_count, block.drafted = 1, False
        return block_id

    def _give_back(self, blocks: list[int]) -> None:
        for block_id in reversed(blocks):
            block = self._blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free[block_id] = None
                if not block.hash:  # nothing to find in it: reuse it before the cached ones
                    self._free.move_to_end(block_id, last=False)

    def _take(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.ref_count == 0:
            del self._free[block_id]
        block.ref_count += 1

    def _prompt_end(self, seq: Sequence) -> int:
        """Where the last full block ends within a prompt but for its last token."""
        return (seq.prompt_len - 1) // self.block_size * self.block_size

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


class _Roots:
    """What chains of blocks start from: one for the base, one for each adapter."""

    def __init__(self, root: CacheRoot, salt: int, chain: int) -> None:
        self._root, self._salt, self._chain = root, salt, chain
        self._found: dict[str, bytes] = {}

    def of(self, adapter: str) -> bytes:
        found = self._found.get(adapter)
        if found is None:
            root = replace(self._root, adapter=adapter)
            found = self._found[adapter] = root.digest(self._salt, self._chain, _DIGEST_BYTES)
        return found


def chained(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """The hash of a block of ``tokens`` behind the one of ``parent``."""
    data = array("q", tokens).tobytes()
    return blake2b(data, key=parent, digest_size=_DIGEST_BYTES).digest()
