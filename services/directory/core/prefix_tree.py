"""The prefix tree of all known contexts: runs of packed keys, where they lie, and which of them may be forgotten."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from schemas.kv import KEY_BYTES
from services.directory.core import absence
from services.directory.core import spans as sets
from services.directory.core.journal import Journal
from services.directory.core.key_index import KeyIndex
from services.directory.core.match import Sights
from services.directory.core.media import Media
from services.directory.core.recent_places import RecentPlaces
from services.directory.core.run import Holding, Keys, Run, Tip, path
from services.directory.core.spans import Spans

Piece = tuple[Run, int, int]
"""Offsets [first, last) of a run."""


class Inserted(NamedTuple):
    """Where the keys stand, in order; fewer than were given after a conflict. `orphan` when their parent is unknown."""

    pieces: list[Piece]
    orphan: Run | None = None


class PrefixTree:
    """Keys are chained, so a key names a block and everything before it; each stands in one run only.

    A chain whose parent key is unknown is kept as an orphan, out of reach of a match, and is attached as soon as that
    key is known: nodes report in any order. Each of `on_attach` is called with every orphan that found its parent.
    Blocks that nothing holds, claims or hangs from are idle: remembered until `forget` drops the longest unused.
    """

    def __init__(self) -> None:
        self.root = Run(0, None, 0, memoryview(b"").cast("Q"))
        self.runs: list[Run | None] = [None]
        self.orphans: dict[int, dict[int, Run]] = {}
        self.blocks = 0
        self.idle_blocks = 0
        self.conflicts = 0
        self.on_attach: list[Callable[[Run], None]] = []
        self.sights = Sights()
        self.journal = Journal()
        self.media = Media(self.journal)
        self._idle: OrderedDict[Run, None] = OrderedDict()
        self._free: list[int] = []
        self._index = KeyIndex()
        self._ends: dict[int, Run] = {}
        self._places = RecentPlaces(self.runs, self._ends)

    def find(self, key: int) -> tuple[Run, int] | None:
        """The run that holds `key` and its offset there."""
        if place := self._places.find(key):
            return place
        for ident in self._index.find(key):
            run = self.runs[ident]
            at = run.index_of(key) if run is not None else None
            if run is not None and at is not None:
                return run, at
        return None

    def is_known(self, key: int) -> bool:
        """Whether `key` stands in a run; quick for one that does not."""
        return self._index.may_have(key) and self.find(key) is not None

    def is_held(self, key: int) -> bool:
        """Whether a copy of this block lies anywhere."""
        place = self.find(key)
        return place is not None and any(sets.reach(held, place[1]) > place[1] for held in place[0].held.values())

    def ending_with(self, key: int) -> Run | None:
        """The run whose last key this is."""
        return self._ends.get(key)

    def walk(self, keys: Keys) -> list[Tip]:
        """The runs from the root down along `keys`, each with how many of its blocks are the same."""
        found: list[Tip] = []
        done, total = 0, len(keys)
        run = self.root.children.get(keys[0]) if total else None
        while run is not None:
            mine, left = run.keys, total - done
            same = len(mine) if len(mine) < left else left
            if mine[same - 1] != keys[done + same - 1]:
                same = run.parted
                child = run.children.get(keys[done + same]) if same < left else None
                if child is not None and child.offset == same:
                    found.append((run, same))
                    run, done = child, done + same
                    continue
                same = run.common(0, keys, done)
            found.append((run, same))
            done += same
            if done == total:
                break
            child = run.children.get(keys[done])
            if child is None or child.offset != same:
                break
            run.parted, run = same, child
        return found

    def insert(self, parent: int | None, keys: Keys) -> Inserted:
        """Make the chain `keys` known after block `parent` (None: at the start of a context)."""
        orphan = None
        place = (self.root, -1) if parent is None else self.find(parent)
        if parent is not None and place is None:
            orphan = self._orphan(parent, keys)
            place = None if orphan is None else (orphan, -1)
        if place is None:
            return Inserted([])
        run, position = place[0], place[1] + 1
        if 0 < position < len(run.keys):
            self._places.put(run, position - 1)
        pieces: list[Piece] = []
        done, total = 0, len(keys)
        while done < total:
            same = run.common(position, keys, done) if position < len(run.keys) else 0
            if same:
                pieces.append((run, position, position + same))
                done, position = done + same, position + same
                if done == total and position < len(run.keys):
                    self._places.put(run, position - 1)
                continue
            child = run.children.get(keys[done])
            if child is not None and child.offset == position:
                run, position = child, 0
                continue
            if child is not None or self.is_known(keys[done]):
                self.conflicts += 1
                break
            last = self._up_to_orphan(keys, done) if self.orphans else total
            run, position = self._grow(run, position, keys[done:last])
            grown = last - done
            pieces.append((run, position, position + grown))
            done, position = last, position + grown
        return Inserted(pieces, orphan)

    def locate(self, keys: Keys) -> tuple[list[Piece], int]:
        """Where these keys stand, in whatever order they are, and how many of them are unknown."""
        pieces: list[Piece] = []
        done = unknown = 0
        place = self._places.begun_by(keys) if keys else None
        while done < len(keys):
            run, position = place or self.find(keys[done]) or (None, 0)
            if run is None:
                unknown, done = unknown + 1, done + 1
                continue
            place = None
            while same := run.common(position, keys, done):
                if keys[done : done + same].tobytes() != run.packed(position, position + same):
                    same = 1
                pieces.append((run, position, position + same))
                done, position = done + same, position + same
                child = run.children.get(keys[done]) if done < len(keys) else None
                if child is None or child.offset != position:
                    break
                run, position = child, 0
        if pieces:
            self._places.put_before(*pieces[0][:2])
        return pieces, unknown

    def hold(self, holding: Holding, run: Run, first: int, last: int) -> Spans:
        """`holding` has these blocks now; those it did not have before."""
        held = run.held.get(holding)
        if first < run.seen:
            run.forget_sights(first)
        if held is None:
            run.held[holding] = [first, last]
            holding.runs.add(run)
            new = [first, last]
        elif held[-1] == first:
            held[-1] = last
            new = [first, last]
        else:
            new = sets.add(held, first, last)
        if new:
            holding.blocks += sets.size(new)
            holding.toggle(run.of(new))
        if run.idle:
            self._set_idle(run, min(run.idle, len(run.keys) - last))
        return new

    def extend(self, holding: Holding, parent: int | None, packed: bytes) -> tuple[Run, int] | None:
        """`holding`, which has the end of a run, gets new blocks behind it: what most messages say. The run and where
        it ended before; None if it is anything else, and then nothing is done."""
        run = None if parent is None or self.orphans else self._ends.get(parent)
        held = None if run is None else run.held.get(holding)
        if run is None or held is None or parent is None:
            return None
        first = len(run.keys)
        if held[-1] != first or self.is_known(int.from_bytes(packed[:KEY_BYTES], "little")):
            return None
        del self._ends[parent]
        self._places.put(run, first - 1)
        run.keys.frombytes(packed)
        self._ends[run.keys[-1]] = run
        self._index.put(packed, run.ident)
        if self.journal.open:
            self.journal.chains.append((parent, packed))
        held[-1] = len(run.keys)
        self.blocks += held[-1] - first
        holding.blocks += held[-1] - first
        holding.toggle(packed)
        return run, first

    def drop(self, holding: Holding, run: Run, first: int, last: int) -> Spans:
        """`holding` lost these blocks; those it did have."""
        held = run.held.get(holding)
        if held is None:
            return []
        if first < run.seen:
            run.forget_sights(first)
        gone = sets.remove(held, first, last)
        if gone:
            holding.blocks -= sets.size(gone)
            holding.toggle(run.of(gone))
        if not held:
            del run.held[holding]
            holding.runs.discard(run)
        self.settle(run)
        return gone

    def settle(self, run: Run) -> None:
        """Book how many blocks at the end of `run` are idle; to be called after anything on it came or went."""
        if run is not self.root:
            self._set_idle(run, len(run.keys) - run.needed())

    def touch(self, tips: list[Tip]) -> None:
        """These runs were asked for: forget them last."""
        for run, _ in tips:
            if run.idle:
                self._idle.move_to_end(run)

    def forget(self, keep_blocks: int) -> bool:
        """Forget the idle blocks of one run if more than `keep_blocks` are remembered; whether there is more to do."""
        if self.idle_blocks <= keep_blocks:
            return False
        run, _ = self._idle.popitem(last=False)
        kept, first_key = len(run.keys) - run.idle, run.keys[0]
        self._end(run, None)
        self._index.take(run.packed(kept, len(run.keys)), run.ident)
        self.media.forget(memoryview(run.keys)[kept:])
        absence.trim(run, kept)
        del run.keys[kept:]
        self.blocks -= run.idle
        self.idle_blocks -= run.idle
        run.idle = 0
        if kept:
            self._end(run, run)
        else:
            self._unlink(run, first_key)
        return self.idle_blocks > keep_blocks

    def known(self) -> Iterator[Run]:
        """All runs, parents first."""
        waiting = [*self.root.children.values(), *(run for group in self.orphans.values() for run in group.values())]
        while waiting:
            run = waiting.pop()
            yield run
            waiting += run.children.values()

    def _orphan(self, parent: int, keys: Keys) -> Run | None:
        group = self.orphans.get(parent, {})
        if keys[0] in group:
            return group[keys[0]]
        if self.is_known(keys[0]):
            self.conflicts += 1
            return None
        run = self._new(None, 0, keys[: self._up_to_orphan(keys, 0)], parent)
        self.orphans.setdefault(parent, {})[keys[0]] = run
        self._attach(run)
        return run

    def _grow(self, run: Run, position: int, keys: Keys) -> tuple[Run, int]:
        """Add new keys after offset position-1 of `run`: at its end, or as a run of their own below it."""
        if run is not self.root and position == len(run.keys):
            packed = keys.tobytes()
            self._end(run, None)
            self._places.put(run, position - 1)
            run.keys.frombytes(packed)
            self._book(run, packed)
        else:
            child = self._new(run, position, keys)
            run.children[keys[0]] = child
            run.forks.add(position)
            self.settle(run)
            run, position = child, 0
        if self.orphans:
            self._attach(run)
        return run, position

    def _new(self, parent: Run | None, offset: int, keys: Keys, orphan_of: int | None = None) -> Run:
        ident = self._free.pop() if self._free else len(self.runs)
        run = Run(ident, parent, offset, keys, orphan_of)
        if ident == len(self.runs):
            self.runs.append(run)
        else:
            self.runs[ident] = run
        self._book(run, keys.tobytes())
        return run

    def _book(self, run: Run, packed: bytes) -> None:
        """New keys at the end of a run: idle until something holds or claims them."""
        self.blocks += len(packed) >> 3
        self._index.put(packed, run.ident)
        if self.journal.open:
            self.journal.chains.append((run.before(len(run.keys) - (len(packed) >> 3)), packed))
        self._ends[run.keys[-1]] = run
        self._set_idle(run, run.idle + (len(packed) >> 3))

    def _end(self, run: Run, named: Run | None) -> None:
        """The last key of `run` is about to be another one, or (`named` it) has become this one."""
        if named is not None:
            self._ends[run.keys[-1]] = named
        elif self._ends.get(run.keys[-1]) is run:
            del self._ends[run.keys[-1]]

    def _set_idle(self, run: Run, idle: int) -> None:
        if idle != run.idle:
            self.idle_blocks += idle - run.idle
            run.idle = idle
            if idle:
                self._idle[run] = None
            else:
                self._idle.pop(run, None)

    def _up_to_orphan(self, keys: Keys, done: int) -> int:
        """The end of the new keys that may stand in one run: behind a key that an orphan waits for, it follows."""
        if self.orphans:
            for at in range(done, len(keys)):
                if keys[at] in self.orphans:
                    return at + 1
        return len(keys)

    def _attach(self, run: Run) -> None:
        """Attach what waits for the last key of `run`. An orphan above `run` stays one: real chains have no cycles."""
        group = self.orphans.get(run.keys[-1])
        if group is None:
            return
        offset = len(run.keys)
        above = [ancestor for ancestor, _ in path((run, offset))]
        for first_key, orphan in list(group.items()):
            if orphan in above:
                self.conflicts += 1
                continue
            del group[first_key]
            orphan.orphan_of, orphan.parent, orphan.offset = None, run, offset
            run.children[first_key] = orphan
            run.forks.add(offset)
            self.settle(run)
            for told in self.on_attach:
                told(orphan)
        if not group:
            del self.orphans[run.keys[-1]]

    def _unlink(self, run: Run, first_key: int) -> None:
        if run.orphan_of is not None:
            group = self.orphans[run.orphan_of]
            del group[first_key]
            if not group:
                del self.orphans[run.orphan_of]
        elif run.parent is not None:
            del run.parent.children[first_key]
            run.parent.forks.remove(run.offset)
            self.settle(run.parent)
        self.runs[run.ident] = None
        self._free.append(run.ident)

    def check(self) -> None:
        """Assert that structure, index and bookkeeping agree."""
        self._index.check()
        blocks = idle = 0
        for run in self.known():
            assert self.runs[run.ident] is run
            assert run.keys, f"run {run.ident} is empty"
            assert (run.orphan_of is None) == (run.parent is not None)
            blocks, idle = blocks + len(run.keys), idle + run.idle
            assert run.idle == len(run.keys) - run.needed() >= 0, (run.ident, run.idle)
            assert bool(run.idle) == (run in self._idle)
            assert all(self.is_known(key) and self.find(key) == (run, offset) for offset, key in enumerate(run.keys))
            offsets = sorted(child.offset for child in run.children.values())
            assert offsets == sorted(end for end, times in run.forks.counts.items() for _ in range(times))
            assert all(child.parent is run and child.keys[0] == key for key, child in run.children.items())
            for holding, held in run.held.items():
                sets.check(held)
                assert held
                assert held[-1] <= len(run.keys)
                assert run in holding.runs
        assert self._ends == {run.keys[-1]: run for run in self.known()}
        assert (blocks, idle) == (self.blocks, self.idle_blocks)
        assert sum(run is not None for run in self.runs) == sum(1 for _ in self.known())
