"""What every test run needs."""

from __future__ import annotations

import os

# gRPC's own notices of broken connections are what the tests provoke on purpose.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# Imported here, since importing it while a failure is being reported can crash CPython 3.11's
# parser ("AST constructor recursion depth mismatch") and hide the failure.
import hypothesis  # noqa: F401 - see above.
