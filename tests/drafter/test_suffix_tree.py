"""The tree against a naive reference that knows only the sequences."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from das_verl.drafter import SuffixTree
from das_verl.drafter import _kernels as k


class Naive:
    """All substrings of all sequences, by enumeration."""

    def __init__(self):
        self.sequences = []

    def counts(self):
        return Counter(tuple(s[i:j]) for s in self.sequences for i in range(len(s)) for j in range(i + 1, len(s) + 1))


def next_token(counts, string, alphabet):
    after = [(-counts[(*string, c)], c) for c in range(alphabet) if counts[(*string, c)]]
    return min(after)[1] if after else None


def longest_match(counts, sequence):
    """Longest suffix that has an occurrence besides the one at the sequence's end."""
    return max((n for n in range(1, len(sequence) + 1) if counts[tuple(sequence[-n:])] > 1), default=0)


@st.composite
def histories(draw):
    """(alphabet, operations): add a sequence, open one, or advance an open one."""
    alphabet = draw(st.sampled_from([1, 2, 3, 6]))
    tokens = st.lists(st.integers(0, alphabet - 1), max_size=9)
    kinds = st.sampled_from(["add", "open", "advance", "advance"])
    operations = st.lists(st.tuples(kinds, tokens, st.integers(0, 5)), min_size=1, max_size=14)
    return alphabet, draw(operations)


def play(operations, check=None):
    tree, naive, live = SuffixTree(), Naive(), []
    for kind, tokens, which in operations:
        if kind == "add":
            tree.add(tokens)
            naive.sequences.append(tokens)
        elif kind == "open" or not live:
            cursor = tree.cursor(tree.open(tokens))
            live.append((cursor, list(tokens)))
            naive.sequences.append(live[-1][1])
        else:
            cursor, sequence = live[which % len(live)]
            cursor.advance(tokens)
            sequence.extend(tokens)
        if check:
            check(tree, naive, live)
    return tree, naive, live


@given(histories())
def test_equals_naive_reference(history):
    alphabet, operations = history
    tree, naive, live = play(operations)
    counts = naive.counts()
    tree.check_integrity()
    assert tree.num_tokens == sum(map(len, naive.sequences))
    for string, count in counts.items():
        assert tree.count(string) == count
        assert tree.next_token(string) == next_token(counts, string, alphabet)
    for n in range(1, 5):
        for string in itertools.product(range(alphabet), repeat=n):
            assert tree.count(string) == counts[string]
    for cursor, sequence in live:
        assert cursor.match_len == longest_match(counts, sequence)


@given(histories())
def test_exact_after_each_operation(history):
    def check(tree, naive, live):
        counts = naive.counts()
        tree.check_integrity()
        for cursor, sequence in live:
            assert cursor.match_len == longest_match(counts, sequence)
            if sequence:
                assert tree.count(sequence) == counts[tuple(sequence)]

    play(history[1], check)


@given(histories(), st.randoms(use_true_random=False))
def test_order_of_growth_does_not_matter(history, random):
    """What the tree holds and drafts depends on its sequences, not on how their growth interleaved."""
    _, naive, live = play(history[1])
    other = SuffixTree()
    grown = {id(sequence) for _, sequence in live}
    for sequence in naive.sequences:
        if id(sequence) not in grown:
            other.add(sequence)
    cursors = [other.cursor(other.open()) for _ in live]
    left = [list(sequence) for _, sequence in live]
    while any(left):
        i = random.choice([i for i, tokens in enumerate(left) if tokens])
        cursors[i].advance([left[i].pop(0)])
    for (cursor, _), again in zip(live, cursors, strict=True):
        a, b = cursor.draft(8), again.draft(8)
        assert a.token_ids.tobytes() == b.token_ids.tobytes()
        assert a.match_len == b.match_len


def test_weights_add_up():
    tree = SuffixTree()
    tree.add([1, 2], weight=3)
    tree.add([1, 4])
    cursor = tree.cursor(tree.open([1], weight=2))
    assert (tree.count([1]), tree.count([1, 2]), tree.next_token([1])) == (6, 3, 2)
    assert cursor.match_len == 1


@pytest.mark.parametrize("n", [1, 2, 300, 3000])
def test_one_token_repeated(n):
    """Match and draft stay exact; counts are exact for the DEPTH longest contexts and never too high."""
    tree = SuffixTree()
    cursor = tree.cursor(tree.open([7]))
    for _ in range(n - 1):
        cursor.advance([7])
    assert cursor.match_len == n - 1
    assert cursor.draft(16).token_ids.tolist() == [7] * (16 if n > 1 else 0)
    for m in range(1, n + 1, max(1, n // 50)):
        exact = n - m + 1
        assert min(exact, k.DEPTH) <= tree.count([7] * m) <= exact
    tree.check_integrity()

    finished = SuffixTree()
    finished.add([7] * n)
    assert all(finished.count([7] * m) == n - m + 1 for m in range(1, n + 1, max(1, n // 50)))


def test_two_equal_sequences_in_lockstep():
    """Twins that overtake each other all the time: where Ukkonen's leaf edges go quadratic."""
    tree = SuffixTree()
    twins = [tree.cursor(tree.open()) for _ in range(2)]
    tokens = np.random.default_rng(0).integers(0, 1 << 30, 3000)
    for t in range(0, len(tokens), 2):
        twins[0].advance(tokens[t : t + 1])
        assert twins[0].match_len == t if t == 0 else twins[0].match_len in (0, t)
        twins[1].advance(tokens[t : t + 2])
        twins[0].advance(tokens[t + 1 : t + 2])
        assert [c.match_len for c in twins] == [t + 2, t + 2]
    tree.check_integrity()


def test_drafts_siblings_repetition_and_history():
    tree = SuffixTree()
    tree.add([1, 2, 3, 4])
    a = tree.cursor(tree.open([9, 1]))
    assert a.draft(2).token_ids.tolist() == [2, 3]
    a.advance([5, 6, 7])
    assert a.draft().token_ids.size == 0
    b = tree.cursor(tree.open([9]))
    assert b.draft(3).token_ids.tolist() == [1, 5, 6]
    a.advance([1, 5])
    assert a.draft(2).token_ids.tolist() == [6, 7]


def test_draft_limits():
    tree = SuffixTree()
    tree.add(range(100))
    cursor = tree.cursor(tree.open([0]))
    for n in (0, 1, 5, 99):
        draft = cursor.draft(n)
        assert draft.token_ids.tolist() == list(range(1, n + 1))
        assert draft.token_ids.dtype == np.int32
        assert draft.probs.dtype == np.float32
        assert draft.probs.shape == (n,)
    assert (np.diff(cursor.draft(99).probs) <= 0).all()
    assert cursor.draft(9, min_prob=1.1).token_ids.size == 0


@pytest.mark.parametrize("bad", [[-1], [3, -100], [2**31 - 1], [2**40], [0.5], [[1, 2]], ["a"]])
def test_bad_ids_are_refused_and_change_nothing(bad):
    tree = SuffixTree()
    tree.add([0, 2**31 - 2])
    cursor = tree.cursor(tree.open([0]))
    before = tree._block.words.tobytes()
    for call in (tree.add, tree.open, cursor.advance):
        with pytest.raises(ValueError, match="token"):
            call(bad)
    assert tree._block.words.tobytes() == before
    assert cursor.draft().token_ids.tolist() == [2**31 - 2]


@pytest.mark.parametrize("weight", [0, -1, 17])
def test_bad_weights_are_refused(weight):
    tree = SuffixTree()
    for call in (tree.add, tree.open):
        with pytest.raises(ValueError, match="weight"):
            call([1], weight=weight)


def test_too_many_tokens_are_refused(monkeypatch):
    monkeypatch.setattr("das_verl.drafter.tree._MAX_UNITS", 300)
    tree = SuffixTree()
    cursor = tree.cursor(tree.open(range(200)))
    for call in (cursor.advance, tree.add):
        with pytest.raises(ValueError, match="at most 300 tokens"):
            call(range(150))
    tree.check_integrity()
    assert tree.num_tokens == 200


@pytest.mark.parametrize("word", ["count", "link", "length", "best", "next", "token", "slot", "header"])
def test_integrity_check_notices_damage(word):
    rng = np.random.default_rng(1)
    tree = SuffixTree()
    tree.add(rng.integers(0, 3, 60))
    tree.check_integrity()
    words = tree._block.words
    base = k.HEADER + k.SLOT_WORDS * int(words[k.SLOTS])
    at = base + k.STATE_WORDS * 20
    fields = {"count": k.COUNT, "link": k.LINK, "length": k.LENGTH, "best": k.BEST, "next": k.NEXT}
    if word in fields:
        words[at + fields[word]] += 1000 if word == "count" else 1
    elif word == "token":
        words[at + k.TOKEN] += 1
    elif word == "slot":
        words[k.HEADER + k.SLOT_WORDS * int(np.flatnonzero(words[k.HEADER : base : 4])[3]) + 2] += 1
    else:
        words[k.STATES] -= 1
    with pytest.raises(AssertionError):
        tree.check_integrity()


def test_memory_per_token():
    rng = np.random.default_rng(2)
    tree = SuffixTree()
    base = np.cumsum(rng.integers(0, 500, 4000)) % 3000
    for _ in range(8):
        copy = base.copy()
        copy[rng.integers(0, 4000, 400)] = rng.integers(0, 3000, 400)
        tree.add(copy)
    assert tree.nbytes / tree.num_tokens <= 80
