"""Reading ahead changes nothing of what verl draws, nor where a resumed run goes on."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler

from das_verl.verl import look_ahead
from das_verl.verl.look_ahead import LookAhead

PROMPTS = 7


def collate(rows: list[int]) -> dict[str, Any]:
    return {"raw_prompt": [[{"content": f"question {row}"}] for row in rows]}


def make_loader(batch: int = 2, shuffle: bool = True, workers: int = 0) -> StatefulDataLoader:
    data = OmegaConf.create({"shuffle": shuffle, "seed": 3, "sampler": None})
    dataset = list(range(PROMPTS))
    return StatefulDataLoader(
        dataset,
        batch_size=batch,
        num_workers=workers,
        drop_last=True,
        collate_fn=collate,
        sampler=create_rl_sampler(data, dataset),
    )


def draw(loader: Any, count: int) -> list[Any]:
    """Draw as verl's ``_fetch_one_gen_batch`` does."""
    drawn, iterator = [], getattr(loader, "test_iterator", None)
    for _ in range(count):
        try:
            if iterator is None:
                iterator = iter(loader)
            batch = next(iterator)
        except StopIteration:
            iterator = iter(loader)
            batch = next(iterator)
        drawn.append(batch["raw_prompt"])
    loader.test_iterator = iterator
    return drawn


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_stream_is_the_loaders_and_the_next_batches_are_known(depth, shuffle):
    expected = draw(make_loader(shuffle=shuffle), 30)
    ahead = LookAhead(make_loader(shuffle=shuffle), depth)
    for i, batch in enumerate(expected[: 30 - depth]):
        assert draw(ahead, 1) == [batch]
        assert ahead.upcoming() == list(itertools.chain(*expected[i + 1 : i + 1 + depth]))
    assert len(ahead) == 3
    assert ahead.batch_size == 2


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("drawn", [0, 1, 2, 3, 4, 6])
def test_a_resumed_run_goes_on_where_the_other_stopped(drawn, workers):
    """With and without reading ahead, from the states of either kind of run: verl's own files are the same."""
    ahead = LookAhead(make_loader(workers=workers), depth=1)
    plain = make_loader(workers=workers)
    assert draw(ahead, drawn) == draw(plain, drawn)
    state, plain_state = ahead.state_dict(), plain.state_dict()
    expected = draw(make_loader(workers=workers), drawn + 4)[drawn:]
    assert draw(ahead, 4) == expected
    for saved in (state, plain_state):
        for make in (lambda loader: loader, lambda loader: LookAhead(loader, 1)):
            resumed = make(make_loader(workers=workers))
            resumed.load_state_dict(saved)
            assert draw(resumed, 4) == expected


def test_an_empty_loader_ends_as_it_would():
    with pytest.raises(StopIteration):
        draw(LookAhead(make_loader(batch=PROMPTS + 1), 1), 1)


@pytest.mark.parametrize(
    ("settings", "wrapped"),
    [({}, True), ({"gen_batch_size": 1}, True), ({"sampler": {"class_path": "mine.py"}}, False)],
)
def test_verls_trainer_reads_through_it_unless_a_sampler_learns_from_training(monkeypatch, settings, wrapped):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "_init_dataloader", lambda self: setattr(self, "train_dataloader", make_loader()))
    monkeypatch.setattr(look_ahead, "_loaders", [])
    look_ahead.install()
    look_ahead.install()
    trainer = SimpleNamespace(config=OmegaConf.create({"data": {"train_batch_size": 2, **settings}}))
    PPOTrainer._init_dataloader(trainer)
    assert isinstance(trainer.train_dataloader, LookAhead) == wrapped
    if wrapped:
        assert isinstance(trainer.train_dataloader._loader, StatefulDataLoader)
        draw(trainer.train_dataloader, 1)
    assert len(look_ahead.upcoming_prompts()) == (2 * (2 // settings.get("gen_batch_size", 2)) if wrapped else 0)
