"""`penstock chaos sim`: seeds of the simulator, which runs the cores in virtual time."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from penstock.cli.errors import EXIT_FAILED, report
from penstock.cli.installation import require_broker
from penstock.cli.output import print_json
from penstock.cli.settings import Output, resolve


def sim(
    ctx: typer.Context,
    *,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds.")] = 20,
    first: Annotated[int, typer.Option("--first", min=0, help="The first seed.")] = 0,
    workload: Annotated[
        str,
        typer.Option(
            "--workload",
            "-w",
            metavar="NAME",
            help="`append`: records of all kinds; `transfer`: transactions.",
        ),
    ] = "append",
    bug: Annotated[
        str, typer.Option("--bug", metavar="NAME", help="Put a known bug into the cores.")
    ] = "",
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Look for fewer faults that break the same seed.")
    ] = False,
    story: Annotated[
        bool, typer.Option("--story", help="Tell what happened before a promise was broken.")
    ] = False,
    output: Output = None,
) -> None:
    """Run the cores of a whole cluster in virtual time, seed by seed, under faults of chance.

    A seed that breaks a promise is printed, and breaks it again each time. Exit status: 1 where
    one did, else 0.
    """
    require_broker()
    settings = resolve(ctx, None, output)
    # Imported here: these are all cores of the cluster.
    from penstock.chaos.simulator.bugs import BUGS  # noqa: PLC0415 - see above.
    from penstock.chaos.simulator.simulation import Simulation  # noqa: PLC0415 - see above.
    from penstock.chaos.simulator.simulation import shrink as fewer  # noqa: PLC0415 - see above.

    if workload not in ("append", "transfer"):
        raise typer.BadParameter(f"--workload {workload}: append or transfer is wanted")
    if bug and bug not in BUGS:
        raise typer.BadParameter(f"--bug {bug}: `penstock chaos list` shows the known bugs")
    known = BUGS.get(bug)
    kinds = known.shown_by if known else None
    scripted = known.faults if known else None
    given: dict[str, object] = dict(known.given) if known else {}
    if workload == "transfer":
        given["transactions"] = True
    broken: list[int] = []
    began = time.perf_counter()
    with known.planted() if known else nullcontext():
        for seed in range(first, first + seeds):
            result: Any = Simulation(seed, scripted, only=kinds, given=given).run()
            if result.violation is None:
                continue
            broken.append(seed)
            if shrink:
                result = fewer(result)
            if settings.as_json:
                print_json({"seed": seed, "violation": result.violation})
                continue
            if story:
                print("\n".join(result.story))
            print(result)
    seconds = time.perf_counter() - began
    summary = f"{seeds} seeds in {seconds:.1f} s, {len(broken)} broke a promise"
    if settings.as_json:
        print_json({"seeds": seeds, "broken": broken, "seconds": round(seconds, 1)})
    else:
        report(summary + (f": {', '.join(map(str, broken[:20]))}" if broken else ""))
    if broken:
        raise typer.Exit(EXIT_FAILED)
