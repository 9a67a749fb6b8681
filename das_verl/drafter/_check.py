"""Verification of a tree block, written without regard to speed or to how the kernels work."""

import numpy as np
from numpy.typing import NDArray

from das_verl.drafter import _kernels as k


def check_words(words: NDArray[np.int32]) -> None:
    """Verify every invariant of the block `words`.

    Raises
    ------
    AssertionError
        Naming the first invariant that does not hold.
    """
    n, slots = int(words[k.STATES]), int(words[k.SLOTS])
    units, capacity = int(words[k.UNITS]), int(words[k.CAPACITY])
    base = k.HEADER + k.SLOT_WORDS * slots
    assert units <= capacity, "more tokens than the capacity"
    assert len(words) >= k.words_for(capacity), "block too small"
    assert n <= 2 * units + 2, "more states than the tokens allow"
    state = words[base : base + k.STATE_WORDS * n].reshape(n, k.STATE_WORDS).astype(np.int64)
    table = words[:base].reshape(-1, k.SLOT_WORDS).astype(np.int64)
    length, link, count, best, first, token, extra, best_count = state.T
    assert not state[0].any(), "state 0 means none"
    assert not words[base + k.STATE_WORDS * n :].any(), "dirt behind the states"
    used = np.flatnonzero(table[k.HEADER // k.SLOT_WORDS :, 0])
    assert len(used) == words[k.USED_SLOTS] < slots, "used slots"

    ids = np.arange(k.ROOT + 1, n)
    assert (length[k.ROOT], link[k.ROOT]) == (0, 0), "the root is the empty string"
    assert ((link[ids] >= k.ROOT) & (link[ids] < n)).all(), "links stay inside"
    assert (length[link[ids]] < length[ids]).all(), "links lead to shorter strings"

    edges: dict[tuple[int, int], int] = {}
    for s in range(k.ROOT, n):
        if first[s]:
            edges[s, int(token[first[s]])] = int(first[s])
        slot = int(extra[s])
        listed = 0
        while slot:
            owner, tok, target, following = (int(x) for x in table[slot])
            assert owner == s, "lists of slots stay with their state"
            assert first[s], "slots are used last"
            assert (s, tok) not in edges, "one transition for each token"
            assert token[target] == tok, "transitions carry their target's token"
            edges[s, tok] = target
            listed += 1
            assert listed <= len(used), "lists of slots end"
            slot = following
    assert len(edges) == len(used) + np.count_nonzero(first[k.ROOT :]), "each slot is listed"
    assert len(edges) <= n + units, "more transitions than the tokens allow"

    primary = np.zeros(n, np.int64)
    for (s, tok), t in edges.items():
        assert k.ROOT < t < n, "transitions stay inside"
        assert length[t] > length[s], "transitions lead to longer strings"
        primary[t] += length[t] == length[s] + 1
        # The strings of s + tok are exactly those of t between the lengths of their links.
        assert length[s] + 1 > length[link[t]], "transitions end in the right context"
        shorter = edges.get((int(link[s]), tok)) if link[s] else None
        if link[s]:
            assert shorter is not None, "what follows a string follows its suffixes"
            assert shorter == t or shorter == link[t], "transitions agree with links"
    assert (primary[ids] == 1).all(), "a state's longest string extends one state"

    exact = not words[k.CUT]
    if exact:
        below = np.zeros(n, np.int64)
        np.add.at(below, link[ids], count[ids])
        assert (count[k.ROOT :] >= below[k.ROOT :]).all(), "a suffix is as frequent as what it ends"
        after = np.zeros(n, np.int64)
        for (s, _), t in edges.items():
            after[s] += count[t]
        assert (count[k.ROOT :] >= after[k.ROOT :]).all(), "a prefix is as frequent as what follows"
    top: dict[int, tuple[int, int, int]] = {}
    for (s, tok), t in edges.items():
        top[s] = min(top.get(s, (1, 0, 0)), (-int(count[t]), tok, t))
    for s in range(k.ROOT, n):
        assert best[s] == top.get(s, (0, 0, 0))[2], "best continuation"
        assert best_count[s] == count[best[s]], "count of the best continuation"
