"""The bandwidth that replicas out of sync share, as an account over time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.core.catch_up import (
    BURST_MS,
    MAX_CREDIT_BYTES,
    UNLIMITED,
    CatchUpBudget,
)

MB = 1_000_000


class Sender:
    """Sends whenever it may, pieces of one size."""

    def __init__(self, budget: CatchUpBudget, piece_bytes: int) -> None:
        self.budget = budget
        self.piece_bytes = piece_bytes
        self.ticket = 0
        self.sent_bytes = 0

    def step(self, now_ms: int) -> None:
        if self.budget.wait_ms(self.ticket, now_ms) == 0:
            self.ticket = self.budget.take(self.piece_bytes, now_ms)
            self.sent_bytes += self.piece_bytes


def run(senders: list[Sender], begin_ms: int, end_ms: int) -> None:
    for now_ms in range(begin_ms, end_ms):
        for sender in senders:
            sender.step(now_ms)


@given(
    rate=st.integers(1_000, 100 * MB),
    pieces=st.lists(st.integers(1, MB), min_size=1, max_size=5),
    seconds=st.integers(1, 5),
)
def test_all_senders_together_keep_to_the_rate(rate, pieces, seconds):
    budget = CatchUpBudget(rate, 0)
    senders = [Sender(budget, piece) for piece in pieces]
    run(senders, 0, seconds * 1000)
    burst = rate * BURST_MS / 1000
    # Each sends its last piece when what it sent before is paid.
    assert sum(sender.sent_bytes for sender in senders) <= rate * seconds + burst + sum(pieces)


def test_the_whole_rate_is_used_and_shared_evenly():
    budget = CatchUpBudget(10 * MB, 0)
    senders = [Sender(budget, 50_000) for _ in range(4)]
    run(senders, 0, 10_000)
    for sender in senders:
        assert 24 * MB <= sender.sent_bytes <= 26 * MB


def test_a_piece_larger_than_what_a_second_pays_is_sent_and_paid_off():
    budget = CatchUpBudget(MB, 0)
    ticket = budget.take(32 * MB, 0)
    assert 31_000 <= budget.wait_ms(ticket, 0) <= 32_000
    assert budget.wait_ms(ticket, 32_000) == 0


def test_time_in_which_nobody_sends_is_not_saved_up():
    budget = CatchUpBudget(MB, 0)
    sender = Sender(budget, 10_000)
    run([sender], 3_600_000, 3_601_000)
    assert sender.sent_bytes <= MB * (1000 + BURST_MS) / 1000 + sender.piece_bytes


def test_a_backlog_shrinks_at_the_rate_however_fast_the_log_grows():
    budget = CatchUpBudget(MB, 0)
    sender = Sender(budget, 10_000)
    backlog = 5 * MB
    for now_ms in range(10_000):
        backlog += 3_000  # 3 MB a second, three times what may be sent.
        budget.grew(3_000, now_ms)
        if backlog - sender.sent_bytes >= sender.piece_bytes:
            sender.step(now_ms)
    assert backlog - sender.sent_bytes < 2 * sender.piece_bytes
    assert sender.sent_bytes >= 5 * MB + 10_000 * 3_000 - 2 * sender.piece_bytes


def test_growth_that_nobody_takes_is_credited_in_bounds():
    budget = CatchUpBudget(MB, 0)
    for _ in range(1000):
        budget.grew(MB, 0)
    sender = Sender(budget, MB)
    for _ in range(1000):
        sender.step(0)
    assert sender.sent_bytes <= MAX_CREDIT_BYTES + 2 * MB


def test_another_rate_holds_for_those_who_wait():
    budget = CatchUpBudget(1_000, 0)
    ticket = budget.take(MB, 0)
    assert budget.wait_ms(ticket, 1_000) > 900_000
    budget.set_rate(MB, 1_000)
    assert budget.wait_ms(ticket, 1_000) <= 1_000
    budget.set_rate(UNLIMITED, 1_000)
    assert budget.wait_ms(ticket, 1_000) == 0
    budget.take(100 * MB, 1_000)
    budget.set_rate(MB, 2_000)
    ticket = budget.take(MB, 2_000)
    assert budget.wait_ms(ticket, 2_000) <= 1_000  # What was sent without a limit is not owed.
