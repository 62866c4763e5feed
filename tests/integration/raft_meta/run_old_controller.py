"""Runs one ControllerServer as run_controller.py does, of software that knows the oldest level."""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

from penstock.raft_meta.core import versions

versions.METADATA_VERSION = 1  # Before anything takes it from there.

from run_controller import main  # noqa: E402 - as said above; it lies beside this file.

if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(json.loads(sys.argv[1]))))
