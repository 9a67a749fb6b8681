"""verl's replay buffer, looking for finished rollouts more often.

verl looks every 2 seconds. That is nothing beside a rollout of minutes, but would blur the quickstart's, which take a
few seconds. Set by ``trainer.v1.sampler.custom_sampler``, in both runs.
"""

from functools import partial

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

ResponsiveReplayBuffer = partial(ReplayBuffer, poll_interval=0.05)
