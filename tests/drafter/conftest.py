from hypothesis import HealthCheck, settings

settings.register_profile(
    "drafter",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("drafter")
