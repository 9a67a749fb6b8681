"""State of running requests, one row each, and the calls that move all of them."""

import numpy as np
from numpy.typing import NDArray

from das_verl.drafter import _kernels as k

# Weights of the acceptance model before it has learnt anything (features: `_kernels._score`). Fitted by
# logistic regression on rollouts of a 3 B policy on mathematics, with trees of rollouts 400 updates older.
START = np.array([-1.03, 0.62, 0.19, 0.47, -0.53, -0.04, 0.46])


class Rows:
    """Arrays over rows; row i draws from tree `trees[i]`, of which 0 may stand for none."""

    def __init__(self, size: int) -> None:
        self.trees = np.zeros(size, np.int32)
        self.state = np.zeros((size, k.ROW_WORDS), np.int32)
        self.rates = np.zeros(size)
        self.drafts = np.zeros((size, k.LEARNT + 1), np.int32)
        self.features = np.zeros((size, k.LEARNT + 1, k.FEATURES), np.float32)
        self.models = START[None].copy()

    def __len__(self) -> int:
        return len(self.trees)

    def double(self) -> None:
        """Double the number of rows."""
        for name in ("trees", "state", "rates", "drafts", "features"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))

    def add_model(self) -> None:
        """Add a fresh acceptance model."""
        self.models = np.concatenate([self.models, START[None]])

    def start(self, row: int, weight: int, model: int = 0) -> None:
        """Begin an empty sequence in `row`, without a tree yet."""
        self.trees[row] = 0
        self.state[row] = k.ROOT, -1, weight, model
        self.rates[row] = k.RATE_START
        self.drafts[row, 0] = 0

    def advance(
        self,
        addresses: NDArray[np.int64],
        which: NDArray[np.int32],
        tokens: NDArray[np.int32],
        counts: NDArray[np.int64],
        done: NDArray[np.int64],
        learning_rate: float,
    ) -> tuple[int, int]:
        """Call the kernel of that name."""
        return k.advance(
            addresses,
            self.trees,
            self.state,
            self.rates,
            self.drafts,
            self.features,
            self.models,
            which,
            tokens,
            counts,
            done,
            learning_rate,
        )

    def propose(
        self,
        addresses: NDArray[np.int64],
        which: NDArray[np.int32],
        budgets: NDArray[np.int32],
        min_probs: NDArray[np.float64],
        tokens: NDArray[np.int32],
        probs: NDArray[np.float32],
        counts: NDArray[np.int32],
    ) -> int:
        """Call the kernel of that name."""
        return k.propose(
            addresses,
            self.trees,
            self.state,
            self.rates,
            self.drafts,
            self.features,
            self.models,
            which,
            budgets,
            min_probs,
            tokens,
            probs,
            counts,
        )
