"""On which server each request runs, so that all servers are done at about the same time."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence


def longest_first(lengths: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Place requests longest first, each on the server that has the least to do by then.

    On servers that are idle at first, the busiest one then has at most ``4/3 - 1/(3 m)`` times the work that the best
    placement on ``m`` servers would give it (R. L. Graham, 1969).

    Parameters
    ----------
    lengths : sequence of float
        Tokens that each request is expected to generate.
    loads : sequence of float
        Tokens that each server is expected to generate anyway; at least one server.

    Returns
    -------
    list of int
        Index in ``loads`` of each request's server.
    """
    servers = [(load, i) for i, load in enumerate(loads)]
    heapq.heapify(servers)
    placed = [0] * len(lengths)
    for request in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        load, server = servers[0]
        heapq.heapreplace(servers, (load + lengths[request], server))
        placed[request] = server
    return placed


class Placement:
    """The servers' loads, and a place for each request that is known to come.

    Places are planned together, longest request first, when the first request comes, and planned anew for those still
    to come when servers or expected lengths have changed. A request that nobody knew of goes where the least is
    expected, running or planned.

    Parameters
    ----------
    expected : callable
        From a prompt's key to the tokens of its next response; from None to those of a prompt that nothing is known
        of. Not negative.
    """

    def __init__(self, expected: Callable[[str | None], int]) -> None:
        self._expected = expected
        self._to_come: Counter[str | None] = Counter()  # requests by key
        self._places: dict[str | None, deque[tuple[str, int]]] = {}  # of those: server and length
        self._running: dict[tuple[str, str], list[int]] = {}  # lengths by server and request
        self._loads: dict[str, int] = {}  # running and planned, by server
        self._changed = True

    def expect(self, requests: Iterable[str | None]) -> None:
        """Note all requests that will come next, by key; None where it is not known yet.

        They replace those of an earlier call that have not come.
        """
        self._to_come = Counter(requests)
        self._changed = True

    def revise(self) -> None:
        """Note that expected lengths have changed; requests that have started stay where they are."""
        self._changed |= self._to_come.total() > 0

    def start(self, request: str, key: str | None, servers: Collection[str], server: str | None = None) -> str:
        """Choose the server of a request, and count the request there until it ends.

        Parameters
        ----------
        request : str
            Name of the request, for :meth:`end`. Several with one name may run.
        key : str, or None
            Key of its prompt.
        servers : collection of str
            All servers, at least one.
        server : str, optional
            Where the request must run, if that is among ``servers``: it goes on there.
        """
        if self._changed or self._loads.keys() != set(servers):
            self._plan(servers)
        planned = key if self._places.get(key) else None
        if server not in self._loads and self._places.get(planned):
            server, length = self._places[planned].popleft()
            self._to_come[planned] -= 1
        else:
            if server not in self._loads:
                server = min(self._loads, key=self._loads.__getitem__)
            length = self._expected(key)
            self._loads[server] += length
        self._running.setdefault((server, request), []).append(length)
        return server

    def end(self, request: str, server: str) -> bool:
        """Note that a request has ended; return False if it had not been started, or its server was gone since."""
        lengths = self._running.get((server, request))
        if not lengths:
            return False
        self._loads[server] -= lengths.pop()
        if not lengths:
            del self._running[server, request]
        return True

    def _plan(self, servers: Collection[str]) -> None:
        self._changed = False
        self._running = {at: lengths for at, lengths in self._running.items() if at[0] in servers}
        self._loads = dict.fromkeys(servers, 0)
        for (server, _), running in self._running.items():
            self._loads[server] += sum(running)
        expected = {key: self._expected(key) for key in self._to_come}
        requests = list(self._to_come.elements())
        names = list(self._loads)
        placed = longest_first([expected[key] for key in requests], list(self._loads.values()))
        self._places = {}
        for key, i in zip(requests, placed, strict=True):
            self._places.setdefault(key, deque()).append((names[i], expected[key]))
            self._loads[names[i]] += expected[key]
