"""Knowing the next batch of prompts before it is drawn, so that its trees are built while the policy is updated."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import Any


class LookAhead:
    """verl's training data loader, read some batches ahead.

    It yields what the loader yields and ends where the loader ends. Its state, which verl saves, is the loader's state
    before the first batch that has not been drawn.

    Parameters
    ----------
    loader : StatefulDataLoader
    depth : int
        Batches to be ahead.
    """

    def __init__(self, loader: Any, depth: int) -> None:
        self._loader = loader
        self._depth = depth
        self._iterator: Iterator[Any] | None = None
        # (state before it, batch); the batch is None where an epoch ends.
        self._ahead: deque[tuple[Any, dict[str, Any] | None]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> LookAhead:
        return self

    def __next__(self) -> dict[str, Any]:
        if not self._ahead:
            self._read()
        _, batch = self._ahead.popleft()
        if batch is None:
            raise StopIteration
        while not self._is_far_enough():
            self._read()
        return batch

    def state_dict(self) -> Any:
        """Return the state to resume from."""
        return self._ahead[0][0] if self._ahead else self._loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state."""
        self._ahead.clear()
        self._iterator = None
        self._loader.load_state_dict(state)

    def upcoming(self) -> list[Any]:
        """Return the raw prompts of the batches read ahead."""
        return [prompt for _, batch in self._ahead if batch is not None for prompt in batch["raw_prompt"]]

    def _read(self) -> None:
        state = self._loader.state_dict()
        if self._iterator is None:
            self._iterator = iter(self._loader)
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator = None
        self._ahead.append((state, batch))

    def _is_far_enough(self) -> bool:
        batches = [batch for _, batch in self._ahead]
        return len(batches) - batches.count(None) >= self._depth or batches[-2:] == [None, None]  # nothing comes


_loaders: list[LookAhead] = []


def upcoming_prompts() -> list[Any]:
    """Return the raw prompts that this process's trainer will draw next, as far as known."""
    return _loaders[-1].upcoming() if _loaders else []


def install() -> None:
    """Let verl's trainer read its data through :class:`LookAhead`.

    verl's V1 trainer draws a batch when it is to be generated and offers no way to ask for the one after it
    (verl/trainer/ppo/v1/trainer_base.py, ``_init_dataloader`` and ``_fetch_one_gen_batch``). Wraps the one method that
    makes the loader; where the loader cannot tell its state, or a sampler of the user's chooses by what has been
    trained on, the loader is left as it is, and trees are built once the batch is drawn.
    """
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    original = getattr(PPOTrainer._init_dataloader, "__wrapped__", PPOTrainer._init_dataloader)

    @functools.wraps(original)
    def with_look_ahead(self: Any) -> None:
        original(self)
        data = self.config.data
        own_sampler = data.get("sampler") is not None and data.sampler.get("class_path") is not None
        if not own_sampler and hasattr(self.train_dataloader, "state_dict"):
            depth = max(1, data.train_batch_size // (data.get("gen_batch_size") or data.train_batch_size))
            self.train_dataloader = LookAhead(self.train_dataloader, depth)
            _loaders[:] = [self.train_dataloader]

    setattr(PPOTrainer, "_init_dataloader", with_look_ahead)  # noqa: B010
