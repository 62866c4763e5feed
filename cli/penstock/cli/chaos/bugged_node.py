"""Runs a node of a cluster under test with a known bug in it: one rule of the protocol left out.

``python -m penstock.cli.chaos.bugged_node BUG ARGS`` is ``python -m penstock.cli.child ARGS`` with
a bug of ``penstock.cli.chaos.node_bugs`` in the node. It is for proving that
the harness finds it, and for learning to read its reports.
"""

from __future__ import annotations

import runpy
import sys

from penstock.cli.chaos.node_bugs import BUGS
from penstock.cli.child import watch_parent


def main() -> None:
    """Watch the parent and become the node."""
    watch_parent()
    name = sys.argv.pop(1)
    sys.argv[0] = "penstock.broker"
    with BUGS[name].planted():
        runpy.run_module("penstock.broker", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
