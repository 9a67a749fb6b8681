#!/usr/bin/env python3
"""Measure the drafter, and the suffix tree behind vLLM's `suffix` method (arctic-inference) beside it.

Both run in turns, several rounds in one process; medians and their ratio are printed. The peer is left out
where it is not installed.

Traces: a table (.parquet, .jsonl or .jsonl.gz) with the columns problem_id, policy_step, sample and response,
the last a text or a list of token ids. Texts are split by --tokenizer (a tokenizer.json), or by a simple rule
for words, numbers and signs. A problem's history is its newest samples of all policy steps but the last, replayed
are the first samples of the last one; a drafted token counts as accepted where it equals the recorded one,
which estimates acceptance by rejection sampling without bias. The default traces are three epochs of the
quickstart (make_traces.py): short answers, good for a first look.

    bench_drafter.py --traces rollouts.parquet --tokenizer tokenizer.json --json figures.json
"""

import argparse
import gzip
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from das_verl.drafter import SuffixTree, TreeStore, _kernels
from das_verl.drafter._rows import START, Rows
from das_verl.drafter.store import _LEARNING_RATE, _LIVE_WEIGHT
from das_verl.drafter.tree import Block

try:
    from arctic_inference.suffix_decoding._C import SuffixTree as Peer
except ImportError:
    Peer = None

ROOT = Path(__file__).resolve().parents[1]
TRACES = ROOT / "scripts" / "data" / "quickstart_rollouts.jsonl.gz"
TOKENIZER = ROOT / "recipes" / "quickstart" / "policy" / "tokenizer.json"
COLUMNS = ("problem_id", "policy_step", "sample", "response")
PEER_DEPTH = 24
PEER_CONFIGS = [(4, 1.0), (8, 1.0), (16, 1.0), (16, 2.0), (16, 4.0)]  # draft length, factor; probability 0.1
# Draft length, min_prob.
OUR_CONFIGS = [(16, 0.8), (16, 0.5), (16, 0.3), (32, 0.2), (32, 0.1), (32, 0.05), (32, 0.02), (32, 0.01)]
GROWTH = {  # column of the growth table: label and scale in the plot
    "build_ns": ("build, ns/token", 1),
    "draft_us": ("draft of 8, ns/row", 1000),
    "append_us": ("append and match, ns/token", 1000),
    "bytes": ("memory, bytes/token", 1),
    "peer_build_ns": ("peer: build, ns/token", 1),
}
ABLATION = {
    "all": {},
    "learning off": {"learning_rate": 0.0},
    "siblings count like history": {"weight": 1},
    "siblings count three times": {"weight": 3},
    "siblings count four times": {"weight": 4},
    "newest epoch counts twice": {"recency": 2},
    "newest epoch twice, siblings four times": {"recency": 2, "weight": 4},
    "longest context's best token only": {"CANDIDATES": 1},
    "longest context's statistics only": {"CANDIDATES": 1, "CONTEXTS": 1},
    "longest context's frequencies, no model": {"CANDIDATES": 1, "CONTEXTS": 1, "weight": 1, "model": False},
}


class Problem(NamedTuple):
    """Rollouts of one problem, int32 arrays, oldest first."""

    history: list[np.ndarray]
    replay: list[np.ndarray]
    newest: int  # of the history, the last so many are of the last policy step before the replayed one


def load(args):
    """Return the problems of the traces.

    Raises
    ------
    SystemExit
        Where the traces cannot be used; says in one line why.
    """
    path = args.traces
    try:
        if path.suffix == ".parquet":
            import pandas

            rows = pandas.read_parquet(path).to_dict("records")
        else:
            with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
                rows = [json.loads(line) for line in file]
        missing = [column for column in COLUMNS if any(column not in row for row in rows)]
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(f"bench_drafter: cannot read {path}: {str(error).splitlines()[0]}") from error
    if missing:
        raise SystemExit(f"bench_drafter: {path} lacks {', '.join(missing)}; a row needs {', '.join(COLUMNS)}")
    encode = encoder(args.tokenizer or (TOKENIZER if path == TRACES else None))
    grouped = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: [row[column] for column in COLUMNS[:3]]):
        grouped[row["problem_id"]][row["policy_step"]].append(row["response"])
    problems = []
    for steps in grouped.values():
        *earlier, replay = steps.values()
        if not earlier:  # a single step: the rest of it is replayed
            earlier, replay = [replay[: args.history]], replay[args.history :]
        history = []
        for step in reversed(earlier):
            history = step[: args.history - len(history)] + history
        replay = [text for text in map(encode, replay[: args.replay]) if len(text) > 2]
        if history and replay:
            problems.append(Problem([encode(r) for r in history], replay, min(len(earlier[-1]), len(history))))
    if not problems:
        raise SystemExit(f"bench_drafter: {path} has no problem with rollouts both to learn from and to replay")
    return problems


def encoder(tokenizer):
    """Return what makes token ids of a response."""
    if tokenizer:
        from tokenizers import Tokenizer

        try:
            model = Tokenizer.from_file(str(tokenizer))
        except Exception as error:  # tokenizers raises nothing narrower
            raise SystemExit(f"bench_drafter: cannot read {tokenizer}: {error}") from error
        split = lambda text: model.encode(text, add_special_tokens=False).ids  # noqa: E731
    else:
        split = lambda text: [zlib.crc32(w.encode()) >> 2 for w in re.findall(r" ?\w+|\d|\s+|.", text)]  # noqa: E731
    return lambda response: np.asarray(split(response) if isinstance(response, str) else response, np.int32)


class Ours:
    """One tree and one row of the drafter, as the store drives them."""

    def __init__(self, problem, models, weight, recency, draft_length):
        self.block = Block(sum(len(t) + 1 for t in problem.history) + 100_000)
        weights = np.ones(len(problem.history), np.int32)
        weights[-problem.newest :] = recency
        self.block.build(problem.history, weights)
        self.addresses = np.array([self.block.address], np.int64)
        self.rows = Rows(1)
        self.rows.models = models
        self.weight = weight
        self.which = np.zeros(1, np.int32)
        self.budget = np.array([draft_length], np.int32)
        self.tokens = np.empty((1, draft_length), np.int32)
        self.probs = np.empty((1, draft_length), np.float32)
        self.count = np.empty(1, np.int32)

    def start(self, tokens):
        """Begin a request."""
        self.rows.start(0, self.weight)
        self.advance(tokens, 0.0)
        self.rows.rates[0] = _kernels.RATE_START

    def advance(self, tokens, learning_rate):
        """Append verified tokens."""
        count = np.array([len(tokens)], np.int64)
        self.rows.advance(self.addresses, self.which, tokens, count, np.zeros(1, np.int64), learning_rate)

    def draft(self, min_prob):
        """Draft from where the request stands."""
        prices = np.array([min_prob], np.float64)
        self.rows.propose(self.addresses, self.which, self.budget, prices, self.tokens, self.probs, self.count)
        return self.tokens[0, : self.count[0]]


def agreed(draft, text, position):
    """Return the number of leading draft tokens that the text confirms."""
    rest = text[position : position + len(draft)]
    different = np.flatnonzero(draft[: len(rest)] != rest)
    return int(different[0]) if different.size else len(rest)


def replay_ours(
    problems,
    draft_length,
    min_prob,
    models=START,
    weight=_LIVE_WEIGHT,
    recency=1,
    learning_rate=_LEARNING_RATE,
    samples=None,
    seen=None,
):
    """Replay request after request; return tokens and drafted tokens per step.

    An occurrence in the request or in a sibling counts `weight`, one in the newest step of the history `recency`.
    `samples` collects (features, accepted) of the tokens whose predecessors were accepted, `seen` the
    predicted probability and fate of all drafted tokens.
    """
    models = models[None].copy()
    steps = tokens = drafted = 0
    for problem in problems:
        ours = Ours(problem, models, weight, recency, draft_length)
        for text in problem.replay:
            ours.start(text[:1])
            position = 1
            while position < len(text):
                draft = ours.draft(min_prob)
                n = agreed(draft, text, position)
                judged = min(n + 1, len(draft), len(text) - position)
                if samples is not None:
                    samples.append((ours.rows.features[0, :judged].copy(), np.arange(judged) < n))
                if seen is not None and position + len(draft) <= len(text):
                    seen.append((ours.probs[0, : len(draft)].copy(), np.arange(len(draft)) < n))
                step = min(n + 1, len(text) - position)
                ours.advance(text[position : position + step], learning_rate)
                position += step
                steps, tokens, drafted = steps + 1, tokens + step, drafted + len(draft)
    return tokens / steps, drafted / steps


def replay_peer(problems, draft_length, factor):
    """Replay with the peer; as `replay_ours`."""
    steps = tokens = drafted = 0
    for history, replay, _ in problems:
        tree = Peer(PEER_DEPTH)
        for i, text in enumerate(history):
            tree.extend_ndarray(i, text)
        for i, text in enumerate(replay):
            tree.extend_ndarray(10_000 + i, text[:1])
            position = 1
            while position < len(text):
                context = text[max(0, position - PEER_DEPTH) : position]
                draft = np.asarray(
                    tree.speculate_ndarray(context, draft_length, factor, 0.0, 0.1, False).token_ids, np.int32
                )
                step = min(agreed(draft, text, position) + 1, len(text) - position)
                tree.extend_ndarray(10_000 + i, text[position : position + step])
                position += step
                steps, tokens, drafted = steps + 1, tokens + step, drafted + len(draft)
    return tokens / steps, drafted / steps


def fit(problems, **weights):
    """Return the acceptance model's weights by logistic regression on replayed rollouts.

    `weights` of occurrences, as in `replay_ours`.
    """
    model = START
    for _ in range(2):
        samples = []
        replay_ours(problems, 16, 0.03, model, learning_rate=0.0, samples=samples, **weights)
        x = np.concatenate([features for features, _ in samples]).astype(float)
        y = np.concatenate([accepted for _, accepted in samples]).astype(float)
        model = np.zeros(x.shape[1])
        for _ in range(15):
            p = 1 / (1 + np.exp(-x @ model))
            hessian = (x * (p * (1 - p))[:, None]).T @ x + 1e-3 * np.eye(len(model))
            model += np.linalg.solve(hessian, x.T @ (y - p) - 1e-3 * model)
    return model


def at(curve, drafted):
    """Tokens per step of a curve of (tokens, drafted) at `drafted`, by interpolation."""
    tokens, costs = np.array(sorted(curve, key=lambda point: point[1])).T
    return float(np.interp(drafted, costs, tokens, left=np.nan, right=np.nan))


def cost_of(curve, tokens):
    """Drafted tokens per step that give `tokens` per step."""
    gains, costs = np.array(sorted(curve, key=lambda point: point[1])).T
    return float(np.interp(tokens, gains, costs, left=np.nan, right=np.nan))


def acceptance(problems):
    """Curves of both drafters: a list of (tokens per step, drafted per step) each."""
    ours = [replay_ours(problems, *config) for config in OUR_CONFIGS]
    peer = [replay_peer(problems, *config) for config in PEER_CONFIGS] if Peer else []
    return ours, peer


def reliability(problems, bins=10):
    """Predicted against observed acceptance of all drafted tokens, by predicted probability."""
    seen = []
    replay_ours(problems, 16, 0.05, seen=seen)
    probs = np.concatenate([p for p, _ in seen])
    fates = np.concatenate([f for _, f in seen])
    where = np.minimum((probs * bins).astype(int), bins - 1)
    return [
        (int((where == b).sum()), float(probs[where == b].mean()), float(fates[where == b].mean()))
        for b in range(bins)
        if (where == b).any()
    ]


def clocked(call, clock=time.thread_time):
    """Seconds a call takes, of this thread: what else the machine does counts little."""
    start = clock()
    call()
    return clock() - start


def build_ours(histories):
    """Build one tree for each history."""
    trees = []
    for history in histories:
        tree = SuffixTree()
        for text in history:
            tree.add(text)
        tree.flush()
        trees.append(tree)
    return trees


def build_peer(histories):
    """Build the peer's trees."""
    trees = []
    for history in histories:
        tree = Peer(PEER_DEPTH)
        for i, text in enumerate(history):
            tree.extend_ndarray(i, text)
        trees.append(tree)
    return trees


def build_store(histories, threads, window=16):
    """Build the trees as a step does."""
    store = TreeStore(window)
    store.begin_step(dict(enumerate(histories)), threads=threads)
    store.wait()
    return store


def decode_ours(problems, width=64, min_prob=0.2, draft_length=16):
    """Decode in full batches; return microseconds per draft, the same into given arrays (as vLLM's proposer drafts),
    per appended token, and drafted per row.

    Medians over the calls, so that what else the machine does counts little; the two ways to draft take turns.
    """
    store = build_store([history for history, *_ in problems], 2)
    store.min_prob = min_prob
    queue = [(i, text) for i, (_, replay, _) in enumerate(problems) for text in replay][::-1]
    width = min(width, len(queue))
    running = []
    draft_us, into_us, append_us, drafted = [], [], [], []
    tokens, filled = np.empty((width, draft_length), np.int32), np.empty(width, np.int32)
    budgets = np.full(width, draft_length, np.int32)
    while len(queue) + len(running) >= width:
        while len(running) < width:
            i, text = queue.pop()
            running.append([store.open(i), text, 0])
        requests = [row[0] for row in running]
        slots = np.array([request.slot for request in requests], np.int32)
        turn = len(drafted) % 2
        start = time.perf_counter()
        if turn:
            store.propose_into(slots, budgets, tokens, filled)
        else:
            proposed = store.propose(requests, budgets)
        (into_us if turn else draft_us).append(1e6 * (time.perf_counter() - start) / width)
        if turn:
            proposed = [row[:n] for row, n in zip(tokens, filled, strict=True)]
        drafted.append(sum(map(len, proposed)) / width)
        fed = []
        for row, draft in zip(running, proposed, strict=True):
            fed.append(row[1][row[2] : row[2] + agreed(draft, row[1], row[2]) + 1])
            row[2] += len(fed[-1])
        flat, counts = np.concatenate(fed), np.array([len(f) for f in fed])
        start = time.perf_counter()
        store.advance(requests, flat, counts)
        append_us.append(1e6 * (time.perf_counter() - start) / flat.size)
        for row in running:
            if row[2] == len(row[1]):
                store.close(row[0])
        running = [row for row in running if row[2] < len(row[1])]
    return *map(statistics.median, (draft_us, into_us, append_us)), statistics.mean(drafted)


def decode_peer(problems, draft_length=16):
    """The peer has no batched call and no given arrays: row by row. As `decode_ours`."""
    draft_us, append_us, drafted = [], [], []
    for history, replay, _ in problems:
        (tree,) = build_peer([history])
        for i, text in enumerate(replay):
            tree.extend_ndarray(10_000 + i, text[:1])
            position = 1
            while position < len(text):
                start = time.perf_counter()
                context = text[max(0, position - PEER_DEPTH) : position]
                draft = tree.speculate_ndarray(context, draft_length, 1.0, 0.0, 0.1, False).token_ids
                draft_us.append(1e6 * (time.perf_counter() - start))
                drafted.append(len(draft))
                step = min(agreed(np.asarray(draft, np.int32), text, position) + 1, len(text) - position)
                start = time.perf_counter()
                tree.extend_ndarray(10_000 + i, text[position : position + step])
                append_us.append(1e6 * (time.perf_counter() - start) / step)
                position += step
    return *map(statistics.median, (draft_us, draft_us, append_us)), statistics.mean(drafted)


def speed(problems, rounds):
    """Medians over interleaved rounds of all costs, as {figure: (ours, peer)}."""
    histories = [history for history, *_ in problems]
    many = histories * max(1, 2_000_000 // sum(len(t) for h in histories for t in h))
    total, more = (sum(len(t) for h in hs for t in h) for hs in (histories, many))
    runs = defaultdict(list)
    for _ in range(rounds):
        runs["build"].append(total / clocked(lambda: build_ours(histories)) / 1e6)
        if Peer:
            runs["peer build"].append(total / clocked(lambda: build_peer(histories)) / 1e6)
        for threads in (1, 2):
            cpu = time.process_time()
            wall = clocked(lambda t=threads: build_store(many, t), time.perf_counter)
            runs[f"store {threads}"].append(more / wall / 1e6)
            runs[f"store {threads} cpu"].append(more / (time.process_time() - cpu) / 1e6)
        for prefix, decode in (("", decode_ours), ("peer ", decode_peer))[: 2 if Peer else 1]:
            for name, value in zip(("draft", "into", "append", "drafted"), decode(problems), strict=True):
                runs[prefix + name].append(value)
    nbytes = sum(tree.nbytes for tree in build_ours(histories)) / total
    peer_bytes = sum(tree.estimate_memory() for tree in build_peer(histories)) / total if Peer else None
    median = {name: statistics.median(values) for name, values in runs.items()}
    return {
        "build, M tokens/s, one thread": (median["build"], median.get("peer build")),
        "  store, one thread": (median["store 1"], None),
        "  store, two threads": (median["store 2"], None),
        "  store, one thread, per CPU second": (median["store 1 cpu"], None),
        "  store, two threads, per CPU second": (median["store 2 cpu"], None),
        "memory, bytes/token": (nbytes, peer_bytes),
        "draft, us/row of 64": (median["draft"], median.get("peer draft")),
        "  into given arrays": (median["into"], median.get("peer into")),
        "drafted tokens/row": (median["drafted"], median.get("peer drafted")),
        "append and match, us/token": (median["append"], median.get("peer append")),
    }


def growth(problems, sizes, peer_limit, rounds):
    """Costs by tokens in one tree, medians over rounds: {size: {figure: value}}."""
    texts = [t for history, replay, _ in problems for t in history + replay]
    runs = [{size: growth_at(texts, size, size <= peer_limit) for size in sizes} for _ in range(rounds)]
    return {
        size: {name: statistics.median(run[size][name] for run in runs) for name in runs[0][size]} for size in sizes
    }


def growth_at(texts, size, with_peer):
    """Costs in one tree of `size` tokens; texts are repeated with other ids where there are too few."""
    chosen, held = [], 0
    for i in itertools.count():
        cycle, which = divmod(i, len(texts))
        chosen.append(((texts[which].astype(np.int64) + cycle * 1_000_003) % (2**31 - 2)).astype(np.int32))
        held += len(chosen[-1])
        if held >= size:
            break
    row = {"build_ns": clocked(lambda: build_ours([chosen])) / held * 1e9}
    store = build_store([chosen], 1, window=len(chosen))
    probe = chosen[:: max(1, len(chosen) // 64)][:64] * 64
    probe = probe[:64]
    requests = [store.open(0) for _ in probe]
    budgets = np.full(len(requests), 8, np.int32)
    draft_s, append_s = [], []
    for i in range(0, 80, 2):
        flat = np.concatenate([t[i : i + 2] for t in probe])
        counts = [len(t[i : i + 2]) for t in probe]
        append_s.append(clocked(lambda f=flat, c=counts: store.advance(requests, f, c)) / max(1, len(flat)))
        draft_s.append(clocked(lambda: store.propose(requests, budgets)) / len(requests))
    row["draft_us"] = statistics.median(draft_s) * 1e6
    row["append_us"] = statistics.median(append_s) * 1e6
    row["bytes"] = store.stats().tree_bytes / store.stats().num_tokens
    if Peer and with_peer:
        row["peer_build_ns"] = clocked(lambda: build_peer([chosen])) / held * 1e9
    return row


def plot(growth, acceptance, path):
    """Draw the growth table and the acceptance curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (costs, gains) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for (name, (label, scale)), style in zip(GROWTH.items(), ("o-", "s--", "^-.", "d:", "x-"), strict=True):
        points = [(size, row[name] * scale) for size, row in growth.items() if name in row]
        if points:
            costs.loglog(*zip(*points, strict=True), style, label=label)
    costs.set(title="Cost by size of the tree", xlabel="tokens in one tree", ylabel="ns, or bytes")
    costs.set_ylim(bottom=costs.get_ylim()[0] / 6)  # room for the legend
    for (name, curve), style in zip(acceptance.items(), ("o-", "x--"), strict=True):
        if curve:
            tokens, drafted = zip(*curve, strict=True)
            gains.plot(drafted, tokens, style, label={"ours": "das-verl", "peer": "arctic-inference"}[name])
    gains.set(title="What drafts gain", xlabel="drafted tokens per step", ylabel="tokens per step")
    for axes in (costs, gains):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="lower right", fontsize="small", ncols=2 if axes is costs else 1)
    figure.savefig(path, dpi=110)


def ablate(test, train, only=None):
    """Curves, as of `acceptance`, with parts changed or taken away; the model is fitted on `train` for each.

    Kernel constants are compiled in, so a variant that changes one runs in a process of its own.
    """
    result = {}
    for name, changes in ABLATION.items():
        if only is not None and name != only:
            continue
        constants = {key: value for key, value in changes.items() if key.isupper()}
        if constants and only is None:
            with tempfile.TemporaryDirectory() as cache:
                run = subprocess.run(
                    [sys.executable, *sys.argv, "--only", name],
                    env=os.environ | {"NUMBA_CACHE_DIR": cache},
                    capture_output=True,
                    text=True,
                    check=True,
                )
            result[name] = json.loads(run.stdout.splitlines()[-1])
            continue
        for key, value in constants.items():
            setattr(_kernels, key, value)
        options = {key: value for key, value in changes.items() if not key.isupper()}
        if options.pop("model", True):
            models = fit(train, **{key: options[key] for key in ("weight", "recency") if key in options})
        else:
            # The share of the best token alone decides.
            models = np.eye(_kernels.FEATURES)[1]
            options["learning_rate"] = 0.0
        result[name] = [replay_ours(test, *config, models, **options) for config in OUR_CONFIGS]
    return result


def main():
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--tokenizer", help="tokenizer.json for traces that hold text")
    parser.add_argument("--problems", type=int, default=24, help="measured; the rest of the traces is for --fit")
    parser.add_argument("--history", type=int, default=16)
    parser.add_argument("--replay", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000, 1_000_000, 4_000_000])
    parser.add_argument("--peer-limit", type=int, default=1_000_000, help="largest tree the peer builds")
    parser.add_argument("--fit", action="store_true", help="fit the acceptance model on the other problems")
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--plot", help="picture of the growth table and of acceptance")
    parser.add_argument("--json", help="all figures")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    problems = load(args)
    test, train = problems[: args.problems], problems[args.problems :] or problems
    if train is problems and (args.fit or args.ablate):
        print("no problems are left for fitting: fitting on those that are measured", file=sys.stderr)
    if args.only:
        print(json.dumps(ablate(test, train, args.only)[args.only]))
        return
    figures = {}
    show = lambda value: "-" if value is None else f"{value:.3g}"  # noqa: E731

    build_ours([test[0][0]])
    figures["speed"] = speed(test, args.rounds)
    print(f"\n{'':40}{'ours':>8}{'peer':>8}{'ratio':>8}")
    for name, (ours, peer) in figures["speed"].items():
        print(f"{name:40}{show(ours):>8}{show(peer):>8}{show(ours / peer if peer else None):>8}")

    ours, peer = acceptance(test)
    figures["acceptance"] = {"ours": ours, "peer": peer}
    print(f"\n{'drafted/step':>14}{'tokens/step':>14}")
    for tokens, drafted in ours:
        print(f"{drafted:14.2f}{tokens:14.3f}")
    if peer:
        print(f"\n{'drafted/step':>14}{'peer':>8}{'ours':>8}{'ratio':>8}{'ours drafts for the same':>26}")
        for tokens, drafted in peer:
            gain = at(ours, drafted)
            print(f"{drafted:14.2f}{tokens:8.3f}{gain:8.3f}{gain / tokens:8.3f}{cost_of(ours, tokens):26.2f}")

    figures["reliability"] = reliability(test)
    print(f"\n{'drafted':>10}{'predicted':>11}{'observed':>10}")
    for count, predicted, observed in figures["reliability"]:
        print(f"{count:10}{predicted:11.3f}{observed:10.3f}")

    if args.fit:
        figures["fit"] = fit(train).tolist()
        print("\nfitted:", [round(w, 2) for w in figures["fit"]])
    if args.ablate:
        figures["ablation"] = ablate(test, train)
        points = [drafted for _, drafted in (peer or ours[2:6])]
        print("\ntokens/step at drafted/step" + "".join(f"{p:8.2f}" for p in points))
        for name, curve in figures["ablation"].items():
            print(f"{name:36}" + "".join(f"{at(curve, p):8.3f}" for p in points))
    if args.sizes:
        figures["growth"] = growth(problems, args.sizes, args.peer_limit, args.rounds)
        names = list(next(iter(figures["growth"].values())))
        print(f"\n{'tokens':>10}" + "".join(f"{name:>15}" for name in names))
        for size, row in figures["growth"].items():
            print(f"{size:10}" + "".join(f"{show(row.get(name)):>15}" for name in names))
    if args.plot:
        plot(figures.get("growth", {}), figures["acceptance"], args.plot)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
