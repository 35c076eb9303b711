"""The kill grid: one run, a hundred rounds, in each a SIGKILL of slave 1, slave 2 or the master a little later after
FinishPush: 0 to 400 ms in steps of 4 ms."""

from __future__ import annotations

import time

import pytest

from tests.chaos.deployment import Deployment

ROUNDS, STEP_S = 100, 0.004
VICTIMS = ("ps0", "ps1", "master")
CHECK_EVERY = 10
DEPLOYMENT = {"step_s": 0.05, "timing": {"window_s": 0.1}}


@pytest.mark.timeout(900)  # three and a half minutes on idle cores
def test_the_kill_grid(deployment: Deployment) -> None:
    """Whatever the moment: a version is there on all disks, or it never was; nothing is folded twice, or lost."""
    for number in range(ROUNDS):
        victim = VICTIMS[number % len(VICTIMS)]
        finish = deployment.to_master["east"].calls.trap("FinishPush")
        finish.release()  # it is not held: we only see it pass
        finish.caught()
        time.sleep(number * STEP_S)  # the grid is one of milliseconds
        deployment.process(victim).kill()
        _ = deployment.start_master() if victim == "master" else deployment.start_slave(victim)
        deployment.progress(1)
        deployment.check_history()
        if number % CHECK_EVERY == CHECK_EVERY - 1:
            deployment.check()
