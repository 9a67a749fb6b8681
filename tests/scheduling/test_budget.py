from hypothesis import given, settings
from hypothesis import strategies as st

from das_verl.scheduling import draft_budget


@settings(derandomize=True)
@given(st.integers(0, 5000), st.integers(1, 1000), st.integers(1, 128))
def test_all_requests_together_stay_within_what_is_nearly_free(running, verify_tokens, max_draft):
    budget = draft_budget(running, verify_tokens, max_draft)
    assert 0 <= budget <= max_draft
    assert budget * running <= verify_tokens
    assert budget == max_draft or (budget + 1) * max(1, running) > verify_tokens


def test_a_large_batch_drafts_nothing():
    assert draft_budget(running=257, verify_tokens=256, max_draft=16) == 0
