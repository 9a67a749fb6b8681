"""History from the rollout dumps of an earlier run."""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

from das_verl.history import Trajectory, text_hash
from das_verl.history.dumps import Rollout, dump_files, read_dump

_log = logging.getLogger(__name__)
_REPORT_EVERY_S = 10.0


def read_warm_start(path: Path, tokenizer: Any, window: int) -> dict[str, list[Trajectory]]:
    """Return the newest trajectories of each prompt in a dump, by the hash of the prompt's text.

    Dumps hold text without special tokens. Their responses are tokenised again, which need not give the same ids:
    drafts from them may be a little worse, what is sampled is the same. Bad lines are left out with a warning.

    Parameters
    ----------
    path : Path
        A file or folder that verl wrote (``trainer.rollout_data_dir``).
    tokenizer : PreTrainedTokenizerBase
    window : int
        Trajectories kept per prompt.
    """
    read: dict[str, deque[Rollout]] = {}
    bad: list[str] = []
    files = dump_files(path)
    told = time.monotonic()
    for n, file in enumerate(files):
        if time.monotonic() - told > _REPORT_EVERY_S:
            told = time.monotonic()
            _log.info("reading rollout dumps, %d of %d files", n, len(files))
        for rollout in read_dump(file):
            if isinstance(rollout, str):
                bad.append(rollout)
                continue
            read.setdefault(text_hash(rollout.prompt), deque(maxlen=window)).append(rollout)
    for line in bad[:10]:
        _log.warning("left out of das.history.warm_start: %s", line)
    if len(bad) > 10:
        _log.warning("and %d more bad lines", len(bad) - 10)
    return {
        text: [
            Trajectory.of([], tokenizer.encode(r.response, add_special_tokens=False), step=r.step, reward=r.score)
            for r in rollouts
        ]
        for text, rollouts in read.items()
    }
