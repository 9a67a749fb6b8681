"""Budget policies on a simulated rollout, larger than a machine at hand: ``python -m das_verl.scheduling.simulate``.

The requests of a rollout are placed on ranks. An engine step of a rank takes ``c_base + c_tok * tokens`` (DAS, arXiv
2511.13841); each running request verifies one token and its drafts, and gains one token and the drafts that are
accepted. The rollout takes as long as its slowest rank. Prices, lengths and placement are those of the product.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
import typer
from numba import njit
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from das_verl.scheduling.budget import draft_prices
from das_verl.scheduling.lengths import Lengths, remaining
from das_verl.scheduling.placement import longest_first

# Share of drafts whose first 1, 2, ... tokens are all accepted.
CURVES = {
    "shared": (0.60, 0.37, 0.28, 0.16, 0.09, 0.07, 0.06, 0.035, 0.03, 0.025),
    "reasoning": (0.76, 0.56, 0.33, 0.32, 0.22, 0.15, 0.10, 0.07, 0.05, 0.04),
}
WORKLOADS = {"2,500": (2500, 1.1), "4,000": (4000, 0.9), "6,000": (6000, 0.8)}  # mean length, spread between prompts
_WITHIN = 0.35  # spread of the responses to one prompt
_FIXED = (2, 3, 4, 6)
_UNLIMITED = 10
_BY_CLASS = np.array([0, 4, _UNLIMITED])  # drafts of Short, Medium and Long
_PACE = (2, 3, 4, 6, _UNLIMITED)  # drafts of the longest response that `known lengths` tries
_EVERY = 32  # engine steps between two looks at the running requests
_NEWEST = 0.05  # weight of the newest step in what was drafted and accepted lately

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """The responses of one rollout, and what is known of their prompts.

    Attributes
    ----------
    lengths : ndarray of int64, shape (n,)
        Tokens of each response.
    prompts : ndarray of int64, shape (n,)
        Prompt of each.
    past : ndarray of int64, shape (prompts, any)
        Lengths of earlier responses to each prompt.
    end : int
        Most tokens of a response.
    """

    lengths: Ints
    prompts: Ints
    past: Ints
    end: int


@dataclass(frozen=True)
class Acceptance:
    """What becomes of drafts: a request starts at a random row, and each token that it gains takes it one row on.

    Attributes
    ----------
    chances : ndarray of float32, shape (rows, d)
        Chance, as the drafter tells it, that the first 1, 2, ... `d` drafted tokens are all accepted; 0 from where the
        draft ends.
    accepted : ndarray of int64, shape (rows,)
        Drafted tokens that are accepted if all are drafted.
    """

    chances: NDArray[np.float32]
    accepted: Ints


@dataclass(frozen=True)
class Cost:
    """Seconds of an engine step before its first token, and of each token."""

    base: float = 8e-3
    per_token: float = 25e-6


@dataclass
class Rank:
    """The requests of a rank while they run, ``n`` of them; what a policy may look at and where it says what to draft.

    Attributes
    ----------
    workload : Workload
    requests : ndarray of int64, shape (n,)
        Their rows in the workload.
    done : ndarray of int64, shape (n,)
        Tokens generated so far.
    limit : ndarray of int64, shape (n,)
        Most drafts; for the policy to set.
    weight : ndarray of float64, shape (n,)
        As `remaining` in :func:`draft_prices`, whose prices hold where these are above 0; for the policy to set.
    """

    workload: Workload
    requests: Ints
    done: Ints
    limit: Ints
    weight: Floats


Policy = Callable[[Rank], None]


def log_normal(
    seed: int, mean: float, between: float, prompts: int = 128, each: int = 16, end: int = 16384
) -> Workload:
    """Draw lengths that are log-normal between prompts and for each prompt.

    Parameters
    ----------
    mean : float
        Mean length, before lengths are cut at ``end``.
    between : float
        Standard deviation of the logarithm between prompts; that of one prompt's responses is 0.35.
    each : int
        Responses to each prompt, now and earlier.
    """
    rng = np.random.default_rng(seed)
    middle = rng.normal(np.log(mean) - (between**2 + _WITHIN**2) / 2, between, (prompts, 1))
    lengths = np.exp(middle + _WITHIN * rng.normal(size=(prompts, 2 * each)))
    lengths = np.clip(np.ceil(lengths), 1, end).astype(np.int64)
    return Workload(lengths[:, :each].ravel(), np.repeat(np.arange(prompts), each), lengths[:, each:], end)


def drawn(curve: tuple[float, ...], rows: int = 100_000, seed: int = 0) -> Acceptance:
    """Draw what becomes of drafts whose first ``d`` tokens are accepted with chance ``curve[d - 1]`` everywhere."""
    hits = np.random.default_rng(seed).random((rows, 1)) < np.array(curve)
    return Acceptance(np.tile(np.array(curve, np.float32), (rows, 1)), hits.sum(axis=1))


def fixed(drafts: int) -> Policy:
    """Draft up to so many tokens, always."""

    def policy(rank: Rank) -> None:
        rank.limit[:] = drafts

    return policy


def classes(workload: Workload) -> Policy:
    """Draft 10, 4 or no tokens by the class of the expected length, see :class:`Lengths`."""
    lengths = _history(workload)
    initial = np.array([lengths.initial_class(p) for p in range(len(workload.past))])[workload.prompts]

    def policy(rank: Rank) -> None:
        rank.limit[:] = _BY_CLASS[lengths.classes(initial[rank.requests], rank.done)]

    return policy


def solved(workload: Workload) -> Policy:
    """Draft what is above :func:`draft_prices`; each request weighs what it is expected to have left."""
    lengths = _history(workload)
    likely = np.array([lengths.likely(p) for p in range(len(workload.past))])

    def policy(rank: Rank) -> None:
        rank.limit[:] = _UNLIMITED
        end = np.full(len(rank.requests), workload.end)
        remaining(likely[workload.prompts[rank.requests]], rank.done, end, rank.weight)

    return policy


def uniform(rank: Rank) -> None:
    """Draft what is above :func:`draft_prices`; each request weighs the same."""
    rank.limit[:] = _UNLIMITED
    rank.weight[:] = 1.0


def known_lengths(acceptance: Acceptance, pace: int) -> Policy:
    """Draft just enough to end with the longest response, which drafts up to ``pace`` tokens: a bound, not a policy."""
    gain = np.array([1 + np.minimum(acceptance.accepted, d).mean() for d in range(pace + 1)])

    def policy(rank: Rank) -> None:
        left = rank.workload.lengths[rank.requests] - rank.done
        rank.limit[:] = np.minimum(np.searchsorted(gain, gain[-1] * left / left.max() - 1e-9), pace)

    return policy


def as_verl(workload: Workload, ranks: int, seed: int = 0) -> list[Ints]:
    """Place equally many requests on each rank, whichever."""
    return np.array_split(np.random.default_rng(seed).permutation(len(workload.lengths)), ranks)


def by_length(lengths: Floats | Ints, ranks: int) -> list[Ints]:
    """Place requests longest first, by what their lengths are, or are expected to be."""
    placed = np.array(longest_first(lengths.tolist(), [0.0] * ranks))
    return [np.flatnonzero(placed == r) for r in range(ranks)]


def rollout_time(
    workload: Workload,
    acceptance: Acceptance,
    policy: Policy,
    placed: list[Ints],
    cost: Cost | None = None,
    seed: int = 0,
) -> float:
    """Return the seconds that a rollout takes.

    Parameters
    ----------
    placed : list of ndarray of int64
        The requests of each rank, all of the workload's together.
    """
    cost = cost or Cost()
    starts = np.random.default_rng(seed).integers(0, len(acceptance.accepted), len(workload.lengths))
    return max(_rank_time(workload, acceptance, policy, requests, starts[requests], cost) for requests in placed)


def _rank_time(
    workload: Workload, acceptance: Acceptance, policy: Policy, requests: Ints, at: Ints, cost: Cost
) -> float:
    n = len(requests)
    done, limit, weight = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n)
    lately = np.zeros((2, n))  # drafted, accepted
    seconds = 0.0
    while len(requests):
        n = len(requests)
        rank = Rank(workload, requests, done, limit[:n], weight[:n])
        policy(rank)
        seconds += _steps(
            _EVERY, workload.lengths[requests], done, at, rank.limit, rank.weight, lately,
            acceptance.chances, acceptance.accepted, cost.base, cost.per_token,
        )  # fmt: skip
        left = done < workload.lengths[requests]
        requests, done, at, lately = requests[left], done[left], at[left], lately[:, left]
    return seconds


@njit(nogil=True, cache=True)
def _steps(steps, lengths, done, at, limit, weight, lately, chances, accepted, base, per_token):
    """Make engine steps until so many are made or no request is left; return the seconds that they take."""
    n = lengths.size
    running = np.flatnonzero(done < lengths)
    price = np.zeros(n)
    seconds = 0.0
    for _ in range(steps):
        if running.size == 0:
            break
        if weight[running[0]] > 0:
            out = np.empty(running.size)
            draft_prices(weight[running], 0, base / per_token, lately[1][running], lately[0][running], out)
            price[running] = out
        tokens = 0
        for i in running:
            row = at[i]
            most = min(limit[i], lengths[i] - done[i] - 1, chances.shape[1])
            drafts = 0
            while drafts < most and chances[row, drafts] > price[i]:
                drafts += 1
            gained = 1 + min(accepted[row], drafts)
            lately[0, i] += _NEWEST * (drafts - lately[0, i])
            lately[1, i] += _NEWEST * (gained - 1 - lately[1, i])
            tokens += 1 + drafts
            done[i] += gained
            at[i] = (row + gained) % accepted.size
        seconds += base + per_token * tokens
        running = running[done[running] < lengths[running]]
    return seconds


def _history(workload: Workload) -> Lengths:
    lengths = Lengths()
    for prompt, past in enumerate(workload.past.tolist()):
        # Half tell the class, the other half what becomes of a response of that class.
        lengths.add(prompt, past[: len(past) // 2])
        lengths.add(prompt, past[len(past) // 2 :])
    return lengths


def compare(
    workload: Workload, acceptance: Acceptance, ranks: int = 8, cost: Cost | None = None, seed: int = 0
) -> dict[str, float]:
    """Return the rollout time of each policy, relative to none with requests placed as verl does."""
    even, known = as_verl(workload, ranks, seed), by_length(workload.lengths, ranks)
    longest = by_length(workload.past.mean(axis=1)[workload.prompts], ranks)
    time = partial(rollout_time, workload, acceptance, cost=cost, seed=seed)
    times = {"none": time(fixed(0), even)}
    for drafts in (*_FIXED, _UNLIMITED):
        times[f"{drafts} drafts"] = time(fixed(drafts), even)
    times["none, longest first"] = time(fixed(0), longest)
    times["best of 2 to 6, longest first"] = min(time(fixed(drafts), longest) for drafts in _FIXED)
    times["classes"] = time(classes(workload), longest)
    times["solved, equal weights"] = time(uniform, longest)
    times["solved"] = time(solved(workload), longest)
    times["lengths known"] = min(time(known_lengths(acceptance, pace), known) for pace in _PACE)
    return {policy: t / times["none"] for policy, t in times.items()}


def main(
    seeds: Annotated[int, typer.Option(help="Workloads drawn of each kind; the table has their means.", min=1)] = 2,
    ranks: Annotated[int, typer.Option(help="Ranks; 128 prompts x 16 responses are placed on them.", min=1)] = 8,
    base_ms: Annotated[float, typer.Option(help="Milliseconds of an engine step before its first token.")] = 8.0,
    token_us: Annotated[float, typer.Option(help="Microseconds of each token of a step.")] = 25.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare budget policies on simulated rollouts: time relative to none, lower is better."""
    cost = Cost(base_ms * 1e-3, token_us * 1e-6)
    if not (cost.base >= 0 and cost.per_token > 0):
        raise typer.BadParameter("a step cannot take less than no time, and a token must take some")
    kinds = [(c, w) for c in CURVES for w in WORKLOADS]
    runs: dict[tuple[str, str], list[dict[str, float]]] = {kind: [] for kind in kinds}
    console = Console(stderr=True)
    todo = [(kind, seed) for kind in kinds for seed in range(seeds)]
    for (curve, name), seed in track(todo, "simulating", console=console, transient=True):
        workload = log_normal(seed, *WORKLOADS[name])
        runs[curve, name].append(compare(workload, drawn(CURVES[curve]), ranks, cost, seed))
    means = {k: {p: float(np.mean([r[p] for r in of_kind])) for p in of_kind[0]} for k, of_kind in runs.items()}
    if as_json:
        print(json.dumps([{"acceptance": c, "mean_length": w, **means[c, w]} for c, w in kinds]))
        return
    table = Table("policy", *(f"{c} {w}" for c, w in kinds), title="rollout time, relative to none")
    for policy in means[kinds[0]]:
        table.add_row(policy, *(f"{means[kind][policy]:.3f}" for kind in kinds))
    Console(width=None if Console().is_terminal else 120).print(table)


if __name__ == "__main__":
    typer.run(main)
