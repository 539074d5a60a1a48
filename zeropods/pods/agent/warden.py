"""The warden of a pod: the agent's parent. Where the agent is killed, it ends what the agent had under it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from zeropods.pods.agent.orders import Orders, take_orders
from zeropods.pods.agent.subreaper import become_subreaper, end_descendants, reap
from zeropods.private_folder import POD, make_private_folder

AGENT_SECONDS = 10.0
"""From SIGTERM, which is passed on to the agent, until it is killed with all that is under it."""
KILL_SECONDS = 30.0
FOREVER_SECONDS = 86_400.0
ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def main() -> int:
    """Be a pod until it ends; returns the exit status.

    It splits in two before anything heavy is loaded: this process stays small, and has nothing to do
    but to outlive the other.
    """
    orders = take_orders()
    become_subreaper()
    folder = make_private_folder(POD)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *ENDING})
    warden = os.getpid()
    agent = os.fork()
    if agent == 0:
        from zeropods.pods.agent.agent import run_agent

        return run_agent(orders, folder, warden)
    return _guard(agent, orders, folder)


def _guard(agent: int, orders: Orders, folder: Path) -> int:
    status = None
    try:
        status = _await_agent(agent)
    finally:
        is_clean = end_descendants(KILL_SECONDS)
        shutil.rmtree(folder, ignore_errors=True)
    if status is None or status < 0:
        how = f"did not end in {AGENT_SECONDS:.0f} s" if status is None else f"was killed by signal {-status}"
        _say(f"pod {orders.address}: the agent {how}; everything under it was killed")
    if not is_clean:
        _say(f"pod {orders.address}: processes hang in the kernel and did not end on SIGKILL")
    return status if status in (0, 1) and is_clean else 1


def _await_agent(agent: int) -> int | None:
    """The agent's exit code, negative for a signal; None if it did not heed a signal that was passed on."""
    deadline = None
    while True:
        ended, _ = reap()
        if agent in ended:
            return ended[agent]
        patience = FOREVER_SECONDS if deadline is None else max(deadline - time.monotonic(), 0.0)
        got = signal.sigtimedwait({signal.SIGCHLD, *ENDING}, patience)
        if got is None and deadline is not None:
            return None
        if got is not None and got.si_signo in ENDING and deadline is None:
            deadline = time.monotonic() + AGENT_SECONDS
            os.kill(agent, signal.SIGTERM)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
