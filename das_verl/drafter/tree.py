"""Online suffix tree of many sequences, several of them growing at once.

Structure
---------
The tree is kept as a suffix automaton (Blumer et al. 1985): one state for each set of strings with the same
occurrences, suffix links between them, and transitions. Its suffix links *are* the suffix tree of the
reversed text, so everything a suffix tree answers is there. It is used instead of Ukkonen's tree because

* several sequences grow at once. In Ukkonen's tree a leaf that another sequence ran into stops being a leaf,
  and keeping leaf edges explicit then costs up to N^1.5 (Takagi, Inenaga, Arimura, Breslauer, Hendrian:
  Fully-Online Suffix Tree and Directed Acyclic Word Graph Construction for Multiple Texts, Algorithmica
  2020). The automaton has no leaves, no end markers and no positions inside edges: it is exact after each
  token, and interleaving needs no special case;
* inserting a token also finds the match. After its token is inserted, the suffix link of a sequence's state
  is the longest suffix that also occurs elsewhere, be it earlier in the same sequence or in a sibling. So a
  cursor costs nothing, and matches have no length limit;
* every context of the match, shorter by shorter, is a chain of suffix links;
* states hold their best continuation as a state, so a draft follows pointers and looks little up. The text
  itself is not needed and not stored.

Counts
------
The count of a string is the summed weight of its occurrences (weight 1 unless given). Added sequences are
counted exactly. A token of a growing sequence counts for the `DEPTH` longest of its contexts (states on the
chain of suffix links), which bounds its cost; only degenerate text, such as one token repeated for long, has
longer chains, and there the counts of the much shorter contexts stay too low. The best continuation of a
string is the most frequent next token, the smaller id on a tie.

Cost
----
Amortised O(1) expected a token, inserted and matched; where sequences grow in turns, a token may besides walk
over contexts that another sequence has split meanwhile. With N tokens there are at most 2 N states and N slots
in the table, so a block sized for N tokens can never run out in the middle of an insertion.

Sources: Blumer, Blumer, Haussler, Ehrenfeucht, Chen, Seiferas: The Smallest Automaton Recognizing the Subwords
of a Text (1985); for many texts at once, the 2020 paper above. Drafting from suffix trees of past rollouts:
DAS (arXiv 2511.13841), SuffixDecoding (arXiv 2411.04975).
"""

import logging
import mmap
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from das_verl.drafter import _kernels as k
from das_verl.drafter._check import check_words
from das_verl.drafter._rows import Rows

_log = logging.getLogger(__name__)
_MAX_WEIGHT = 16
_MAX_UNITS = 2**31 // _MAX_WEIGHT - 8  # counts and the ids of states, two for each token, stay in int32
_HUGE = 1 << 22  # bytes from which on a mapping asks for huge pages: fewer misses, for up to 2 MB more in use
_warm_lock = threading.RLock()
_warm = False


def as_tokens(tokens: ArrayLike) -> NDArray[np.int32]:
    """Return `tokens` as a contiguous int32 vector.

    Raises
    ------
    ValueError
        If `tokens` is not a vector of integers, or an id is outside [0, 2**31 - 1).
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"tokens must be a vector of integers, got shape {array.shape} of {array.dtype}")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < 2**31 - 1:
        raise ValueError(
            f"token ids must be in [0, 2**31 - 1), got {array.min()} to {array.max()}; strip padding first"
        )
    return np.require(array, np.int32, ["C", "W"])


def _check_weight(weight: int) -> None:
    if not 1 <= weight <= _MAX_WEIGHT:
        raise ValueError(f"weight must be in 1..{_MAX_WEIGHT}, got {weight}")


class Block:
    """Memory of one tree: an anonymous mapping, whose untouched pages cost nothing and which is given back
    to the system at once when dropped."""

    def __init__(self, units: int):
        if units > _MAX_UNITS:
            raise ValueError(f"a tree holds at most {_MAX_UNITS} tokens, asked for {units}")
        warm_up()
        size = 4 * k.words_for(units)
        # Private, because huge pages are not for shared memory.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.words = np.frombuffer(memory, np.int32)
        self.address = self.words.ctypes.data
        k.init(self.address, units)

    @staticmethod
    def size(units: int) -> int:
        """Bytes of address space of a block for `units`."""
        return 4 * k.words_for(units)

    @property
    def nbytes(self) -> int:
        """Bytes in use: header, table and the states there are."""
        return int(4 * (k.HEADER + k.SLOT_WORDS * self.words[k.SLOTS] + k.STATE_WORDS * self.words[k.STATES]))

    def state(self, state: int) -> NDArray[np.int32]:
        """Return the fields of a state."""
        at = k.HEADER + k.SLOT_WORDS * int(self.words[k.SLOTS]) + k.STATE_WORDS * state
        return self.words[at : at + k.STATE_WORDS]

    def build(self, sequences: list[NDArray[np.int32]], weights: NDArray[np.int32]) -> None:
        """Add finished sequences; the block must have room for them."""
        bounds = np.zeros(len(sequences) + 1, np.int64)
        np.cumsum([len(s) for s in sequences], out=bounds[1:])
        k.build(self.address, np.concatenate(sequences), bounds, weights)

    def grown(self, units: int) -> "Block":
        """Return a copy with room for `units`."""
        block = Block(units)
        k.move(self.address, block.address)
        return block


def warm_up() -> None:
    """Compile the kernels, or load them from the cache; says so when it takes long."""
    global _warm
    with _warm_lock:
        if _warm:
            return
        _warm = True
        note = threading.Timer(2.0, _log.warning, ("compiling the drafter's kernels (once, then cached) ...",))
        note.start()
        try:
            tree = SuffixTree()
            tree.add([1, 2, 1])
            cursor = tree.cursor(tree.open([1]))
            cursor.advance([2])
            cursor.draft()
            tree.count([1])
            tree._grow(512)
        finally:
            note.cancel()


@dataclass(frozen=True)
class Draft:
    """A drafted continuation.

    Attributes
    ----------
    token_ids : ndarray of int32, shape (k,)
    probs : ndarray of float32, shape (k,)
        Probability that the draft is accepted up to and including each token; never increases.
    match_len : int
        Tokens of the longest suffix that also occurs elsewhere in the tree.
    """

    token_ids: NDArray[np.int32]
    probs: NDArray[np.float32]
    match_len: int


class SuffixTree:
    """Suffix tree of one problem: finished trajectories and running requests.

    Examples
    --------
    >>> tree = SuffixTree()
    >>> tree.add([1, 2, 3, 4])
    0
    >>> cursor = tree.cursor(tree.open([2]))
    >>> cursor.advance([3])
    >>> cursor.draft(max_tokens=4).token_ids
    array([4], dtype=int32)
    """

    def __init__(self) -> None:
        self._block = Block(256)
        self._addresses = np.array([self._block.address], np.int64)
        self._rows = Rows(2)
        self._live: dict[int, int] = {}  # sequence id -> row
        self._ids = 0
        self._pending: list[tuple[NDArray[np.int32], int]] = []
        self._pending_units = 0

    def add(self, tokens: ArrayLike, weight: int = 1) -> int:
        """Add a finished trajectory.

        Trajectories are collected and built together at the next use of the tree.

        Parameters
        ----------
        tokens : array_like of int, shape (n,)
        weight : int
            What one occurrence counts, 1 to 16.

        Returns
        -------
        int
            Sequence id.

        Raises
        ------
        ValueError
            If an id is outside [0, 2**31 - 1), the weight out of range, or the tree too large (2**27 tokens).
        """
        array = as_tokens(tokens)
        _check_weight(weight)
        self._check_room(array.size)
        self._pending.append((array.copy(), weight))
        self._pending_units += array.size + 1
        self._ids += 1
        return self._ids - 1

    def open(self, prompt_tail: ArrayLike = (), weight: int = 1) -> int:
        """Start a growing sequence with the given tokens and return its id.

        Raises
        ------
        ValueError
            As `add`.
        """
        array = as_tokens(prompt_tail)
        _check_weight(weight)
        self._check_room(array.size)
        self._flush()
        row = len(self._live)
        if row == len(self._rows):
            self._rows.double()
        self._rows.start(row, weight)
        self._live[self._ids] = row
        self._ids += 1
        self._advance(row, array)
        self._rows.rates[row] = k.RATE_START
        return self._ids - 1

    def cursor(self, live: int) -> "Cursor":
        """Return the cursor of a growing sequence.

        Raises
        ------
        KeyError
            If `live` was not returned by `open`.
        """
        return Cursor(self, self._live[live])

    def count(self, tokens: ArrayLike) -> int:
        """Return the summed weight of the occurrences of a string (see the module's notes on counts)."""
        state = self._find(tokens)
        return int(self._block.state(state)[k.COUNT])

    def next_token(self, tokens: ArrayLike) -> int | None:
        """Return the most frequent token after a string, the smallest on a tie; None if nothing follows."""
        best = int(self._block.state(self._find(tokens))[k.BEST])
        return int(self._block.state(best)[k.TOKEN]) if best else None

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        self._flush()
        return self._block.nbytes

    @property
    def num_tokens(self) -> int:
        """Indexed tokens."""
        return int(self._block.words[k.TOKENS]) + self._pending_units - len(self._pending)

    def flush(self) -> None:
        """Build the trajectories added so far; happens by itself at the next use."""
        self._flush()

    def check_integrity(self) -> None:
        """Verify every invariant of the structure, in time linear in its size.

        Raises
        ------
        AssertionError
            Naming the first invariant that does not hold.
        """
        self._flush()
        check_words(self._block.words)

    def _find(self, tokens: ArrayLike) -> int:
        self._flush()
        return int(k.find(self._block.address, as_tokens(tokens)))

    def _check_room(self, tokens: int) -> None:
        units = int(self._block.words[k.UNITS]) + self._pending_units + tokens + 1
        if units > _MAX_UNITS:
            raise ValueError(f"a tree holds at most {_MAX_UNITS} tokens")

    def _grow(self, units: int) -> None:
        self._block = self._block.grown(units)
        self._addresses[0] = self._block.address

    def _reserve(self, units: int) -> None:
        needed = int(self._block.words[k.UNITS]) + units
        capacity = int(self._block.words[k.CAPACITY])
        if needed > capacity:
            self._grow(max(needed, min(capacity + capacity // 2, _MAX_UNITS)))

    def _flush(self) -> None:
        if self._pending:
            sequences, weights = zip(*self._pending, strict=True)
            needed = int(self._block.words[k.UNITS]) + self._pending_units
            if needed > self._block.words[k.CAPACITY]:
                self._grow(needed)
            self._block.build(list(sequences), np.array(weights, np.int32))
            self._pending.clear()
            self._pending_units = 0

    def _advance(self, row: int, tokens: NDArray[np.int32]) -> None:
        self._flush()
        self._reserve(tokens.size + 1)
        which = np.array([row], np.int32)
        count = np.array([tokens.size], np.int64)
        self._rows.advance(self._addresses, which, tokens, count, np.zeros(1, np.int64), 0.0)


class Cursor:
    """Where a growing sequence stands in its tree: its longest suffix that also occurs elsewhere."""

    def __init__(self, tree: SuffixTree, row: int) -> None:
        self._tree = tree
        self._row = row

    @property
    def match_len(self) -> int:
        """Tokens of that suffix."""
        self._tree._flush()
        return int(k.context(self._tree._block.address, self._tree._rows.state, self._row))

    def advance(self, tokens: ArrayLike) -> None:
        """Append verified tokens: they are inserted into the tree and matched.

        Parameters
        ----------
        tokens : array_like of int, shape (n,)

        Raises
        ------
        ValueError
            As `SuffixTree.add`; nothing is appended then.
        """
        array = as_tokens(tokens)
        self._tree._check_room(array.size)
        self._tree._advance(self._row, array)

    def draft(self, max_tokens: int = 16, min_prob: float = 0.0) -> Draft:
        """Draft a continuation.

        Parameters
        ----------
        max_tokens : int
        min_prob : float
            The draft ends before its predicted acceptance falls below this.

        Returns
        -------
        Draft
        """
        tree = self._tree
        tree._flush()
        tokens = np.empty((1, max(max_tokens, 0)), np.int32)
        probs = np.empty(tokens.shape, np.float32)
        count = np.zeros(1, np.int32)
        which = np.array([self._row], np.int32)
        budget = np.array([max_tokens], np.int32)
        tree._rows.propose(tree._addresses, which, budget, np.array([min_prob], np.float64), tokens, probs, count)
        n = int(count[0])
        return Draft(tokens[0, :n], probs[0, :n], self.match_len)
