"""What every test run needs."""

from __future__ import annotations

import os
import signal

# A shell without job control starts what is in its background with SIGINT ignored, and processes
# inherit that: the commands under test are to end by Ctrl-C wherever the tests run.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# gRPC's own notices of broken connections are what the tests provoke on purpose.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# Imported here, since importing it while a failure is being reported can crash CPython 3.11's
# parser ("AST constructor recursion depth mismatch") and hide the failure.
import hypothesis

# No deadline for an example: on a busy machine any one of them may be slow. In CI the examples
# are the same each time, so that a commit is not failed for what another one did; everywhere else
# they are new, which is what finds bugs.
hypothesis.settings.register_profile(
    "penstock",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("penstock")
