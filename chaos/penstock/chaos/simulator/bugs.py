"""Known bugs, put into the cores on purpose: each checker is proven by those it must catch.

Most are mistakes that real systems have made. Each is one rule of the protocol left out.
"""

from __future__ import annotations

from typing import Final

from penstock.chaos.simulator.controller_bugs import CONTROLLER_BUGS
from penstock.chaos.simulator.disk_bugs import DISK_BUGS
from penstock.chaos.simulator.known_bug import Bug
from penstock.chaos.simulator.producer_bugs import PRODUCER_BUGS
from penstock.chaos.simulator.replication_bugs import REPLICATION_BUGS
from penstock.chaos.simulator.shut_log_bugs import SHUT_LOG_BUGS
from penstock.chaos.simulator.transactions.bugs import TRANSACTION_BUGS

BUGS: Final[dict[str, Bug]] = {
    **REPLICATION_BUGS,
    **PRODUCER_BUGS,
    **DISK_BUGS,
    **SHUT_LOG_BUGS,
    **CONTROLLER_BUGS,
    **TRANSACTION_BUGS,
}
"""All of them, by name."""
