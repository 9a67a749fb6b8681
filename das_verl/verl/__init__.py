"""Adapters to verl: plugin entry point, rollout server, scheduler, metrics and the CPU platform."""
