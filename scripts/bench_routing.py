#!/usr/bin/env python3
"""Measure how evenly two replicas finish a batch under DAS's routing and under verl's own, on the same servers.

Starts two rollout servers on a CPU as verl does, with the quickstart's policy, and sends them batches of responses
whose lengths are set, in three orders of arrival, each batch in turns under each routing. Prints medians and ranges
over the rounds: the finish time of the slower replica over the mean, the same of the tokens that they generated, and
the seconds that the batch took. Nothing is drafted, which would hide what routing does.

    bench_routing.py --rounds 8 --noise 0.35
"""

import argparse
import asyncio
import os
import random
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path

# One thread for each of the two engines.
os.environ |= {
    "VERL_PLATFORM": "cpu",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

import ray
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager
from verl.workers.rollout.router import GlobalRequestLoadBalancer

import das_verl.verl.register  # noqa: F401
from das_verl.history import Trajectory, prompt_key
from das_verl.verl.scheduler import SchedulerActor

POLICY = Path(__file__).resolve().parents[1] / "recipes/quickstart/policy"
LENGTHS = [40] * 8 + [100] * 5 + [280] * 2 + [700]  # of the prompts' responses; spread as the quickstart's are
LONGEST = 1000
PAST = 4  # trajectories of each prompt that the scheduler knows
OVERRIDES = [
    "+platform=cpu",
    "+das=on",
    f"actor_rollout_ref.model.path={POLICY}",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.load_format=auto",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    f"actor_rollout_ref.rollout.max_model_len={LONGEST + 50}",
    f"data.max_response_length={LONGEST}",
]


class Client(LLMServerClient):
    """verl's client, noting which server runs what and when each is done."""

    def __init__(self, *args):
        super().__init__(*args)
        self.key, self.server, self.done, self.tokens = {}, {}, {}, Counter()

    async def _acquire_server(self, request_id, **extra):
        # The router alone sees the key, so that nothing is drafted.
        extra["sampling_params"] = {"extra_args": {"das": self.key[request_id]}}
        self.server[request_id], handle = await super()._acquire_server(request_id, **extra)
        return self.server[request_id], handle

    async def respond(self, request_id, prompt, length, expected):
        """Have a response of ``length`` tokens made."""
        self.key[request_id] = prompt_key(prompt)
        params = {"temperature": 1.0, "max_tokens": length, "ignore_eos": True}
        await self.generate(request_id, prompt_ids=prompt, sampling_params=params, priority=-expected)
        self.done[self.server[request_id]] = time.monotonic()
        self.tokens[self.server[request_id]] += length


async def measure(client, servers, requests):
    """Run a batch; return finish time and tokens, each the most over the mean of the servers, and the seconds."""
    began = time.monotonic()
    await asyncio.gather(*(client.respond(*request) for request in requests))
    busy = [client.done.get(server, began) - began for server in servers]
    tokens = [client.tokens[server] for server in servers]
    return max(busy) / statistics.mean(busy), max(tokens) / statistics.mean(tokens), max(busy)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=4, help="responses to each prompt")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of the logarithm of lengths")
    args = parser.parse_args()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=OVERRIDES)
    OmegaConf.resolve(config)
    ray.init(num_gpus=2, num_cpus=32, log_to_driver=False, include_dashboard=False)
    manager = LLMServerManager.create(config)
    servers = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
    verls, scheduler = ray.remote(GlobalRequestLoadBalancer).remote(servers), SchedulerActor.remote(servers, {})
    ray.get(scheduler.configure.remote(OmegaConf.to_container(config.das)))

    rng = random.Random(0)
    prompts = [[rng.randrange(5, 60) for _ in range(24)] for _ in LENGTHS]
    keys = [prompt_key(prompt) for prompt in prompts]

    def draw(which):
        return max(1, min(LONGEST, round(LENGTHS[which] * rng.lognormvariate(0, args.noise))))

    for which, key in enumerate(keys):
        for _ in range(PAST):
            scheduler.report.remote(key, key, "", Trajectory.of([], [1] * draw(which)))
    results = defaultdict(list)
    for turn in range(args.rounds + 1):
        for order in ("longest last", "longest first", "shuffled"):
            batch = [(which, draw(which)) for which in range(len(LENGTHS)) for _ in range(args.rollouts)]
            if order == "longest first":
                batch.reverse()
            if order == "shuffled":
                rng.shuffle(batch)
            for routing in ("verl", "das", "das, fcfs"):
                router, expected = verls, [0] * len(LENGTHS)
                if routing != "verl":
                    router, lengths = scheduler, ray.get(scheduler.begin_step.remote(keys, rollouts=args.rollouts))
                    expected = lengths if routing == "das" else expected
                requests = [
                    (f"{turn} {order} {routing} {i}", prompts[which], length, expected[which])
                    for i, (which, length) in enumerate(batch)
                ]
                got = asyncio.run(measure(Client(config, router), servers, requests))
                for key in keys if router is scheduler else ():
                    ray.get(scheduler.finished.remote(key, [key]))
                if turn:  # the first round warms up
                    results[f"{order}, {routing}"].append(got)
    for name, figures in results.items():
        columns = zip(("finish", "tokens", "seconds"), zip(*figures, strict=True), strict=True)
        print(f"{name:28}", *(f"{c} {statistics.median(v):6.3f} ({min(v):.3f}-{max(v):.3f})  " for c, v in columns))
    ray.shutdown()


if __name__ == "__main__":
    main()
