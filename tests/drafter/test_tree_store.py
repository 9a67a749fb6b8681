import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from das_verl.drafter import SuffixTree, TreeStore
from das_verl.drafter import _kernels as k
from das_verl.drafter._check import check_words
from das_verl.drafter._rows import Rows
from das_verl.drafter.tree import Block


def rollouts(seed, problems=6, samples=6, n=400):
    """Noisy copies of one text for each problem."""
    rng = np.random.default_rng(seed)
    history = {}
    for p in range(problems):
        text = rng.integers(0, 200, n)
        history[b"p%d" % p] = [
            np.where(rng.random(n) < 0.1, rng.integers(0, 200, n), text).astype(np.int32) for _ in range(samples)
        ]
    return history


def decode(store, history, seed=0, budget=8):
    """Run the last trajectory of each problem as two requests at once; return all drafts and their use."""
    rng = np.random.default_rng(seed)
    texts = [t[-1] for t in history.values() for _ in range(2)]
    requests = [store.open(key, texts[2 * i][:3]) for i, key in enumerate(history) for _ in range(2)]
    position = [3] * len(requests)
    drafts, accepted = [], 0
    while True:
        rows = [i for i, p in enumerate(position) if p < len(texts[i])]
        if not rows:
            break
        rng.shuffle(rows)
        proposed = store.propose([requests[i] for i in rows], [budget] * len(rows))
        fed = []
        for i, draft in zip(rows, proposed, strict=True):
            rest = texts[i][position[i] :]
            n = 0
            while n < min(len(draft), len(rest)) and draft[n] == rest[n]:
                n += 1
            accepted += n
            fed.append(rest[: n + 1])
            position[i] += len(fed[-1])
            drafts.append(draft)
        store.advance([requests[i] for i in rows], np.concatenate(fed), [len(f) for f in fed])
    for request in requests:
        store.close(request)
        store.close(request)
    return drafts, accepted


def test_batched_calls_equal_single_cursors():
    history = rollouts(0)
    store = TreeStore()
    store.begin_step(history)
    assert store.wait()
    keys = list(history)
    requests = [store.open(key, history[key][0][:2]) for key in keys]
    cursors = []
    for key in keys:
        tree = SuffixTree()
        for t in history[key]:
            tree.add(t)
        cursors.append(tree.cursor(tree.open(history[key][0][:2], weight=2)))
    rng = np.random.default_rng(0)
    position = 2
    for _ in range(30):
        counts = rng.integers(0, 5, len(keys))
        fed = [history[key][0][position : position + n] for key, n in zip(keys, counts, strict=True)]
        store.advance(requests, np.concatenate(fed), counts)
        budgets = rng.integers(0, 9, len(keys))
        proposed = store.propose(requests, budgets)
        for cursor, tokens, budget, draft in zip(cursors, fed, budgets, proposed, strict=True):
            cursor.advance(tokens)
            assert draft.dtype == np.int32
            assert draft.tolist() == cursor.draft(int(budget)).token_ids.tolist()


def test_history_helps_and_siblings_help():
    history = rollouts(1)
    store = TreeStore()
    store.begin_step(history)
    store.wait()
    drafts, accepted = decode(store, history)
    assert accepted > 0.8 * 12 * 390
    stats = store.stats()
    assert (stats.requests, stats.requests_with_history) == (12, 12)
    assert stats.drafted == sum(map(len, drafts))
    store.begin_step({})
    decode(store, history)
    drafts, accepted = decode(store, history)
    assert accepted > 0.8 * 12 * 390
    assert (store.stats().requests, store.stats().requests_with_history) == (36, 12)


def test_open_never_waits_and_catches_up(monkeypatch):
    release = threading.Event()
    build = Block.build
    monkeypatch.setattr(Block, "build", lambda self, *a: (release.wait(), build(self, *a))[1])
    store = TreeStore()
    start = time.perf_counter()
    store.begin_step({"a": [[1, 2, 3, 4, 5, 6, 7]]})
    request = store.open("a", [1])
    store.advance([request], [2, 3], [2])
    assert store.propose([request], [4])[0].size == 0
    assert not store.wait(0.01)
    assert time.perf_counter() - start < 2
    release.set()
    assert store.wait()
    assert store.propose([request], [2])[0].tolist() == [4, 5]
    assert store.stats().num_tokens == 10


def test_window_keeps_the_newest():
    store = TreeStore(window=2)
    store.begin_step({"a": [[1, 2], [1, 3], [1, 4, 5]]})
    store.wait()
    assert store.stats().num_tokens == 5
    assert store.propose([store.open("a", [1])], [1])[0].tolist() == [3]


def test_end_step_closes_and_late_calls_are_harmless():
    store = TreeStore()
    store.begin_step({"a": [[1, 2, 3]]})
    store.wait()
    request = store.open("a", [1])
    store.end_step()
    store.end_step()
    assert store.propose([request], [3])[0].size == 0
    store.advance([request], [2], [1])
    store.close(request)
    assert store.stats().num_trees == 0
    other = store.open("a", [1])
    assert store.propose([other], [3])[0].size == 0


def test_many_requests_reuse_their_slots():
    store = TreeStore()
    store.begin_step({"a": [[1, 2, 3]]})
    store.wait()
    for _ in range(300):
        requests = [store.open("a", [1]) for _ in range(100)]
        for request in requests:
            store.close(request)
    assert len(store._rows) == 128
    assert not store._open


def test_each_request_has_its_price():
    history = rollouts(8, problems=1)
    store = TreeStore()
    store.begin_step(history)
    store.wait()
    requests = [store.open(b"p0", history[b"p0"][0][:5]) for _ in range(3)]
    slots = np.array([r.slot for r in requests], np.int32)
    tokens, counts = np.empty((3, 30), np.int32), np.empty(3, np.int32)
    probs = np.empty((3, 30), np.float32)
    store.propose_into(slots, np.full(3, 30, np.int32), tokens, counts, probs, np.array([0.0, 0.3, 1.0]))
    assert counts.tolist() == [30, (probs[0] >= 0.3).sum(), 0]
    assert [len(d) for d in store.propose(requests, [30] * 3, [1.0, 0.3, 0.0])] == counts[::-1].tolist()


@pytest.mark.parametrize("tokens", [[1, -1], [2**31 - 1], [2**40], np.array([-1], np.int32), np.array([0.5])])
def test_bad_ids_change_nothing(tokens):
    store = TreeStore()
    store.begin_step({"a": [[1, 2, 3]]})
    store.wait()
    request = store.open("a", [1])
    before = store.stats()
    with pytest.raises(ValueError, match="token"):
        store.advance([request], tokens, [len(tokens)])
    for rows, counts in ((1, [1]), (1, [3]), (1, [1, 1]), (2, [3, -1])):
        with pytest.raises(ValueError, match="counts"):
            store.advance([request] * rows, [1, 2], counts)
    with pytest.raises(ValueError, match="token"):
        store.begin_step({"a": [tokens]})
    assert store.stats() == before
    assert store.propose([request], [1])[0].tolist() == [2]


def test_cap_keeps_the_newest_of_every_problem():
    history = {i: [np.full(1000, j, np.int32) for j in range(8)] for i in range(4)}
    cap = 4 * Block.size(3000)
    store = TreeStore(max_bytes=cap)
    store.begin_step(history)
    store.wait()
    stats = store.stats()
    assert stats.tree_bytes <= cap
    assert stats.num_trees == 4
    assert stats.dropped_tokens + stats.num_tokens == 32_000
    for i in range(4):
        assert store.propose([store.open(i, [7])], [1])[0].tolist() == [7]


@pytest.mark.parametrize("cap", [0, 1000, 200_000, 1_000_000])
def test_cap_holds_while_requests_run(cap):
    store = TreeStore(max_bytes=cap)
    history = rollouts(3, problems=3)
    store.begin_step(history)
    store.wait()
    rng = np.random.default_rng(0)
    requests = [store.open(key) for key in [*history, "new", "newer"] for _ in range(3)]
    for _ in range(40):
        store.advance(requests, rng.integers(0, 2**20, 30 * len(requests)), [30] * len(requests))
        assert sum(len(b.words) * 4 for tree in store._trees.values() if (b := tree.block)) <= cap
        store.propose(requests, [4] * len(requests))
    if cap:
        assert store.stats().frozen_trees or store.stats().num_trees < 5
    # A frozen tree still matches what it knows.
    if cap == 1_000_000:
        text = history[b"p0"][0]
        store.advance([requests[0]], text[:50], [50])
        assert store.propose([requests[0]], [4])[0].tolist() == text[50:54].tolist()
    for block in [tree.block for tree in store._trees.values() if tree.block]:
        check_words(block.words)


def test_probabilities_are_learnt_for_each_temperature():
    """Text that repeats itself half of the time: predicted and observed acceptance meet; others stay put."""
    rng = np.random.default_rng(6)
    text = rng.integers(0, 50, 500)
    store = TreeStore()
    slot_out = np.empty((1, 1), np.int32), np.empty(1, np.int32), np.empty((1, 1), np.float32)
    fresh = None
    for _ in range(6):
        store.begin_step({"a": [text]})
        store.wait()
        request = store.open("a", text[:5], temperature=0.7)
        predicted, observed = [], []
        for i in range(5, 500):
            token = text[i] if rng.random() < 0.5 else 1000 + i
            slots = np.array([request.slot], np.int32)
            tokens, counts, probs = slot_out
            if store.propose_into(slots, np.ones(1, np.int32), tokens, counts, probs):
                predicted.append(float(probs[0, 0]))
                observed.append(tokens[0, 0] == token)
            store.advance([request], [token], [1])
            store.advance([request], text[max(0, i - 5) : i + 1], [min(6, i + 1)])
        fresh = fresh or np.mean(predicted) - np.mean(observed)
    assert abs(np.mean(predicted) - np.mean(observed)) < min(0.05, abs(fresh))
    assert store.stats().accepted > 500
    store.open("a", temperature=1.0)
    assert (store._rows.models[0] != store._rows.models[1]).any()
    assert len(store._rows.models) == 2


def test_a_frozen_tree_still_matches_exactly():
    rng = np.random.default_rng(7)
    text = rng.integers(0, 3, 60).astype(np.int32)
    block = Block(len(text) + 1)
    block.build([text], np.ones(1, np.int32))
    block.words[k.FROZEN] = 1
    substrings = {text[i:j].tobytes() for i in range(60) for j in range(i, 61)}
    rows = Rows(1)
    rows.start(0, 1)
    fed = np.empty(0, np.int32)
    for _ in range(200):
        new = rng.integers(0, 3, rng.integers(1, 4)).astype(np.int32)
        if rng.random() < 0.3:
            new = text[20:40]
        count, done = np.array([new.size]), np.zeros(1, np.int64)
        rows.advance(np.array([block.address]), np.zeros(1, np.int32), new, count, done, 0.0)
        fed = np.concatenate([fed, new])[-60:]
        longest = max(n for n in range(len(fed) + 1) if fed[len(fed) - n :].tobytes() in substrings)
        assert k.context(block.address, rows.state, 0) == longest
    check_words(block.words)


def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_trees_come_and_go_one_by_one():
    store = TreeStore()
    store.add({"a": [[1, 2, 3, 4]]})
    store.add({"b": [[5, 6, 7, 8]]})
    store.wait()
    a, b = store.open("a", [1]), store.open("b", [5])
    store.advance([a, b], [2, 6], [1, 1])
    store.release(["a", "unknown"])
    assert a.slot == 0
    assert [d.tolist() for d in store.propose([a, b], [2, 2])] == [[], [7, 8]]
    assert store.stats().num_trees == 1
    # The room is used again, and nothing of the old tree is left in it.
    store.add({"c": [[1, 9, 9]]})
    store.wait()
    c, again = store.open("c", [1]), store.open("a", [1])
    assert [d.tolist() for d in store.propose([b, c, again], [1, 1, 1])] == [[7], [9], []]
    store.end_step()
    assert store.stats().tree_bytes == 0


@pytest.mark.parametrize("ready", [True, False])
def test_what_is_added_to_a_tree_counts_like_a_sibling(ready):
    store = TreeStore()
    store.add({"a": [[1, 2, 3]]})
    if ready:
        store.wait()
    store.add({"a": [[1, 2, 7]]})
    store.wait()
    request = store.open("a", [1])
    store.advance([request], [2], [1])
    assert store.propose([request], [1])[0].tolist() == [7]
    assert store.stats().num_trees == 1
    store.release(["a"])
    assert store.propose([request], [1])[0].tolist() == []


def test_a_tree_released_before_it_is_built_stays_away():
    store = TreeStore()
    store.add({key: [np.arange(2000)] for key in range(50)}, threads=1)
    store.release(range(50))
    store.wait()
    assert store.stats().tree_bytes == 0
    request = store.open(0, [5])
    assert store.propose([request], [1])[0].tolist() == []


def test_time_without_a_tree_is_visible():
    store = TreeStore()
    store.add({"a": [[1, 2, 3]]}, threads=0)
    request = store.open("a", [1])
    assert store.stats().visible_s > 0
    store.add({}, threads=1)
    store.wait()
    store.propose([request], [1])
    seen = store.stats().visible_s
    assert store.stats().visible_s == seen > 0


def test_nobody_waits_once_the_waiting_request_is_closed():
    store = TreeStore()
    store.add({"a": [[1, 2, 3]]}, threads=0)
    store.open("a", [1])
    store.release(["a"])
    seen = store.stats().visible_s
    assert store.stats().visible_s == seen > 0


def test_much_that_is_added_to_a_tree_is_inserted_bit_by_bit():
    store = TreeStore()
    store.add({"a": [[1, 2, 3]]})
    store.wait()
    rng = np.random.default_rng(0)
    store.add({"a": [rng.integers(0, 99, 1500) for _ in range(6)]})
    sizes = []
    for _ in range(5):
        store.propose([], [])
        sizes.append(store.stats().num_tokens)
    grown = np.diff([3, *sizes])
    assert sizes[-1] == sizes[-2] >= 3 + 6 * 1500
    assert 0 < grown.max() < 3 * 1500 + 9


def test_stores_that_are_emptied_while_they_build_go_on_building():
    store = TreeStore()
    for step in range(50):
        store.add({i: [np.arange(500)] for i in range(8)}, threads=1)
        if step % 2:
            time.sleep(0.0005)
        store.end_step()
    store.add({"a": [[1, 2, 3]]}, threads=1)
    assert store.wait(10)
    assert store.stats().num_trees == 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_returns_to_the_baseline():
    store = TreeStore()
    history = rollouts(4, problems=20, samples=8, n=1000)
    after = []
    for step in range(6):
        store.begin_step(history)
        store.wait()
        decode(store, dict(list(history.items())[:3]), seed=step)
        peak = rss()
        store.end_step()
        after.append(rss())
        assert store.stats().tree_bytes == 0
        assert peak - after[-1] > 8e6
    assert max(after[1:]) - min(after[1:]) < 3e6


def digest(threads):
    history = rollouts(5)
    store = TreeStore(min_prob=0.2)
    sha = hashlib.sha256()
    for step in range(2):
        store.begin_step(history, threads=threads)
        store.wait()
        for draft in decode(store, history, seed=step)[0]:
            sha.update(draft.tobytes() + b"|")
    return sha.hexdigest()


def test_same_bytes_whatever_hash_seed_and_threads():
    seen = set()
    for seed, threads in (("0", 1), ("1", 2), ("77", 4)):
        code = f"import test_tree_store as t; print(t.digest({threads}))"
        env = os.environ | {"PYTHONHASHSEED": seed}
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=env | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        seen.add(run.stdout.strip())
    assert len(seen) == 1
    assert seen == {digest(2)}


def test_import_needs_numpy_and_numba_only():
    code = (
        "import sys; import das_verl.drafter; "
        "print([m for m in ('torch', 'vllm', 'verl', 'ray', 'transformers', 'pandas') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_free_block_is_an_empty_tree():
    block = Block(10)
    assert block.words[k.STATES] == 2
    assert block.nbytes < Block.size(10)
