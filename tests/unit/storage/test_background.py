"""What is deleted in the background: one thread, in order, whatever a job raises."""

from __future__ import annotations

import threading

from penstock.broker.storage.background import BackgroundJobs


def test_many_jobs_share_one_thread_and_keep_their_order() -> None:
    jobs = BackgroundJobs("delete")
    gate = threading.Event()
    done: list[tuple[int, int]] = []
    jobs.run(lambda: done.append((-1, 0 if gate.wait(30) else 1)))
    before = threading.active_count()
    for number in range(500):
        jobs.run(lambda number=number: done.append((number, threading.get_ident())))
    assert threading.active_count() == before
    gate.set()
    jobs.wait()
    assert [number for number, _ in done] == list(range(-1, 500))
    assert len({thread for _, thread in done[1:]}) == 1


def test_a_job_that_fails_does_not_keep_the_next_from_its_turn() -> None:
    jobs = BackgroundJobs("delete")
    done: list[str] = []

    def broken() -> None:
        raise KeyError("a mistake")

    jobs.run(broken)
    jobs.run(lambda: done.append("next"))
    jobs.wait()
    assert done == ["next"]


def test_it_begins_again_after_it_was_idle() -> None:
    jobs = BackgroundJobs("delete")
    done: list[int] = []
    for number in range(3):
        jobs.run(lambda number=number: done.append(number))
        jobs.wait()
    jobs.wait()
    assert done == [0, 1, 2]
