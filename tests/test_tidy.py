"""The rules of the house that no linter knows, as tests: each failure says where and what."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "v1": "proto",
    "wire": "proto",
    "raft_meta": "raft_meta",
    "broker": "broker",
    "client": "client",
    "cli": "cli",
    "pipeline": "pipeline",
    "chaos": "chaos",
}
TREES = sorted(set(PACKAGES.values()))
CORES = ("raft_meta", "broker", "client")
MAX_LINES = 600
NOT_OURS = {".git", ".venv", "build", "dist", "__pycache__", ".hypothesis"}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@cache
def files(*suffixes: str) -> list[Path]:
    """The repository's files with these suffixes, without what is built or cached."""
    found = []
    for directory, names, entries in os.walk(ROOT):
        names[:] = [
            name
            for name in names
            if name not in NOT_OURS and not name.endswith(("_cache", ".egg-info"))
        ]
        found += [Path(directory, name) for name in entries if name.endswith(suffixes)]
    return sorted(path for path in found if path.is_file())


def is_generated(path: Path) -> bool:
    return re.search(r"_pb2(_grpc)?\.pyi?$", path.name) is not None


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_files() -> list[Path]:
    return [path for path in files(".py") if not is_generated(path)]


def product_files() -> list[Path]:
    return [path for path in python_files() if path.relative_to(ROOT).parts[0] in TREES]


def test_files() -> list[Path]:
    return [path for path in python_files() if path.relative_to(ROOT).parts[0] == "tests"]


test_files.__test__ = False  # type: ignore[attr-defined]  # A helper, by its name alone a test.


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """The line and full name of everything that a module imports; ``from a import b`` is a.b."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def called(node: ast.AST) -> str:
    """The dotted name of what a call calls, or nothing."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def fail_with(complaints: list[str], rule: str) -> None:
    assert not complaints, rule + ":\n" + "\n".join(complaints)


# --- files --------------------------------------------------------------------------------------


def test_the_search_finds_files():
    # A tidy test that looks at nothing would pass for ever.
    names = {name_of(path) for path in python_files()}
    assert {"tests/test_tidy.py", "proto/penstock/wire/records.py"} <= names
    assert not any(".venv" in name or "_pb2" in name for name in names)
    assert {name_of(path) for path in product_files()} < names


def test_no_module_is_too_long():
    lengths = {path: len(path.read_text().splitlines()) for path in python_files()}
    fail_with(
        [f"{name_of(path)}: {n} lines" for path, n in lengths.items() if n > MAX_LINES],
        f"a module has at most {MAX_LINES} lines; split it by what its parts are about",
    )


def test_penstock_is_a_namespace_package():
    fail_with(
        [name_of(path) for path in files("__init__.py") if path.parent.name == "penstock"],
        "penstock is a namespace over several trees; this file would hide all but one of them",
    )


@pytest.mark.parametrize(("package", "tree"), PACKAGES.items())
def test_every_package_is_typed_and_described(package, tree):
    directory = ROOT / tree / "penstock" / package
    assert (directory / "py.typed").is_file()
    assert ast.get_docstring(tree_of(directory / "__init__.py")) or package == "v1"


def test_every_directory_of_modules_is_a_package():
    # Without its __init__.py a directory would be a namespace that any other could extend.
    fail_with(
        sorted(
            {
                name_of(path.parent)
                for path in product_files()
                if path.parent.name != "penstock" and not (path.parent / "__init__.py").exists()
                # Spark looks for data sources at the top, in modules named so.
                if not name_of(path).startswith("pipeline/pyspark_penstock")
            }
        ),
        "these directories have modules but no __init__.py",
    )


def test_text_files_are_clean():
    complaints = []
    suffixes = (".py", ".pyi", ".proto", ".toml", ".md", ".yaml", ".yml", ".sh", "Makefile", "run")
    for path in files(*suffixes):
        data = path.read_bytes()
        text = data.decode()
        if data and not data.endswith(b"\n"):
            complaints.append(f"{name_of(path)}: no newline at the end")
        if data.endswith(b"\n\n") and not is_generated(path):
            complaints.append(f"{name_of(path)}: empty lines at the end")
        for number, line in enumerate(text.split("\n"), 1):
            if line.endswith((" ", "\t", "\r")) and not is_generated(path):
                complaints.append(f"{name_of(path)}:{number}: white space at the end")
            if "\t" in line and path.name != "Makefile" and not is_generated(path):
                complaints.append(f"{name_of(path)}:{number}: a tab")
    fail_with(complaints, "text ends in one newline and has no stray white space")


def test_nothing_is_left_over():
    # Spelled in parts, so that this file does not find itself.
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK", "NotImplemented" + "Error")
    pattern = re.compile(r"\b(" + "|".join(words) + r")\b")
    fail_with(
        [
            f"{name_of(path)}:{number}: {line.strip()}"
            for path in files(".py", ".proto", ".toml", ".sh", ".md", "Makefile")
            if not is_generated(path)
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if pattern.search(line)
        ],
        "work that is not done belongs into an issue, not into the code",
    )


def test_no_path_of_a_developers_machine():
    pattern = re.compile("/" + r"(home|root|Users|work)/")
    fail_with(
        [
            f"{name_of(path)}:{number}: {line.strip()}"
            for path in files(".py", ".proto", ".toml", ".sh", ".md", "Makefile", "run")
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if pattern.search(line)
        ],
        "the repository must work anywhere",
    )


def test_links_between_documents_lead_somewhere():
    complaints = []
    for path in files(".md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            if re.match(r"[a-z]+:|#", target):
                continue
            if not (path.parent / target.partition("#")[0]).exists():
                complaints.append(f"{name_of(path)}: {target}")
    fail_with(complaints, "these links lead nowhere")


# --- code ---------------------------------------------------------------------------------------


def test_every_module_says_what_it_is_for():
    fail_with(
        [
            name_of(path)
            for path in python_files()
            if not path.name.startswith("test_")
            and path.read_text().strip()
            and not ast.get_docstring(tree_of(path))
        ],
        "every module but a test has a docstring",
    )


def test_every_exception_to_a_rule_says_why():
    bare = re.compile(r"# noqa(?!: [A-Z]+\d+(, ?[A-Z]+\d+)* ?[-#(] ?\S.{5,})")
    untold = re.compile(r"# type: ignore(?!\[)")
    fail_with(
        [
            f"{name_of(path)}:{number}: {line.strip()}"
            for path in python_files()
            if path != Path(__file__)
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if bare.search(line) or untold.search(line)
        ],
        "write '# noqa: CODE - why' and '# type: ignore[code]'",
    )


def test_only_commands_print():
    allowed = ("cli", "bench", "examples")
    fail_with(
        [
            f"{name_of(path)}:{node.lineno}"
            for path in python_files()
            if path.relative_to(ROOT).parts[0] not in allowed
            for node in ast.walk(tree_of(path))
            if called(node) in ("print", "pprint", "pprint.pprint")
        ],
        "only the command, the benchmarks and the examples print; others log",
    )


def test_one_module_knows_the_raft_engine():
    allowed = re.compile(r"raft_meta/penstock/raft_meta/engine\w*\.py")
    fail_with(
        [
            f"{name_of(path)}:{line}: {module}"
            for path in product_files()
            if not allowed.fullmatch(name_of(path))
            for line, module in imports_of(path)
            if within(module, "pysyncobj")
        ],
        "the engine stands behind penstock.raft_meta.quorum",
    )


@cache
def modules() -> dict[str, Path]:
    """The product's modules by their full names."""
    found = {}
    for path in product_files():
        parts = path.relative_to(ROOT).with_suffix("").parts[1:]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def core_files() -> list[Path]:
    """The modules of the cores, and whatever else of penstock they import but wire and v1.

    What a core stands on is held to a core's rules, wherever it is: import-linter looks at direct
    imports only, since every library reaches for os and time somewhere inside.
    """
    found = [
        path
        for package in CORES
        for path in product_files()
        if path.is_relative_to(ROOT / package / "penstock" / package / "core")
    ]
    for path in found:  # It grows on the way.
        for _, module in imports_of(path):
            if within(module, "penstock") and not within(module, "penstock.wire", "penstock.v1"):
                used = modules().get(module) or modules()[module.rpartition(".")[0]]
                if used not in found:
                    found.append(used)
    return found


def test_there_are_cores():
    found = {path.relative_to(ROOT).parts[0] for path in core_files()}
    assert set(CORES) <= found


PURE_STDLIB = {
    "__future__", "abc", "array", "bisect", "collections", "contextlib", "copy", "dataclasses",
    "enum", "fractions", "functools", "hashlib", "heapq", "itertools", "json", "math", "operator",
    "re", "string", "struct", "types", "typing", "zlib",
}  # fmt: skip


PURE_LIBRARIES = {"crc32c", "google"}  # google.protobuf: messages are values.


def test_cores_stand_on_pure_modules_alone():
    # The contract in pyproject.toml lists what is forbidden; this lists what is allowed, so that
    # a module nobody thought of needs a decision.
    fail_with(
        [
            f"{name_of(path)}:{line}: {module}"
            for path in core_files()
            for line, module in imports_of(path)
            if module.partition(".")[0] not in {"penstock", *PURE_STDLIB, *PURE_LIBRARIES}
        ],
        "a core, and all it imports, takes time, chance, files and threads from its caller",
    )


def test_cores_open_nothing():
    banned = {"open", "input", "exec", "eval", "__import__", "hash"}
    fail_with(
        [
            f"{name_of(path)}:{node.lineno}: {called(node)}()"
            for path in core_files()
            for node in ast.walk(tree_of(path))
            if called(node) in banned
        ],
        "a core reaches for nothing, and answers alike in every process (hash() of text does not)",
    )


# --- tests --------------------------------------------------------------------------------------


def test_no_test_sleeps():
    # tests/support.py waits for conditions with a deadline; a sleep in its place is a race with a
    # timer. Where time itself is the point (to pace a storm, to show that nothing happens) the
    # line says so.
    complaints = []
    for path in test_files():
        if name_of(path) == "tests/support.py":
            continue
        sleeps = {module.rpartition(".")[2] for _, module in imports_of(path)} & {"sleep"}
        lines = path.read_text().splitlines()
        for node in ast.walk(tree_of(path)):
            name = called(node)
            is_sleep = name in ("time.sleep", "asyncio.sleep") or name in sleeps
            # sleep(0) lets other tasks run once; it waits for no time.
            is_instant = is_sleep and [ast.unparse(argument) for argument in node.args] == ["0"]
            if is_sleep and not is_instant and not re.search(r"# \S+ \S+", lines[node.lineno - 1]):
                complaints.append(f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}")
    fail_with(
        complaints, "wait for a condition (tests/support.py), or say on the line why time must pass"
    )


def test_every_test_file_has_tests():
    fail_with(
        [
            name_of(path)
            for path in test_files()
            if path.name.startswith("test_")
            and not re.search(
                r"^(async def test_|def test_|class Test|Test\w+ = )",
                path.read_text(),
                re.MULTILINE,
            )
        ],
        "these have none",
    )


def test_no_test_is_switched_off():
    fail_with(
        [
            f"{name_of(path)}:{node.lineno}"
            for path in test_files()
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Attribute)
            and ast.unparse(node) in ("pytest.mark.skip", "pytest.mark.xfail", "unittest.skip")
        ],
        "a test that fails is mended or removed (skipif, with its condition, is another matter)",
    )


# --- the project --------------------------------------------------------------------------------


def test_settings_know_every_package():
    on_disk = {
        path.name: path.parent.parent.name
        for tree in TREES
        for path in (ROOT / tree / "penstock").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert on_disk == PACKAGES
    tool = PYPROJECT["tool"]
    assert sorted(tool["hatch"]["build"]["dev-mode-dirs"]) == TREES
    assert sorted(tool["hatch"]["build"]["targets"]["wheel"]["packages"]) == [
        f"{tree}/penstock" for tree in TREES
    ]
    assert sorted(tool["mypy"]["mypy_path"].split(":")) == TREES
    assert sorted(tool["ruff"]["src"]) == TREES
    packages = {f"penstock.{package}" for package in PACKAGES}
    assert set(tool["importlinter"]["root_packages"]) == packages
    # Without what is generated; of tests it looks at their calls' arguments.
    assert set(tool["mypy"]["packages"]) == packages - {"penstock.v1"} | {"tests"}


def test_dependencies_are_bounded_and_sorted():
    project = PYPROJECT["project"]
    groups = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    for group, requirements in groups.items():
        names = [re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements]
        assert names == sorted(names), f"{group} is not sorted"
        for requirement in requirements:
            is_bounded = "==" in requirement or ("<" in requirement and ">=" in requirement)
            assert is_bounded or requirement.startswith("penstock["), requirement


def test_every_make_target_is_described():
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)", text, re.MULTILINE)
    targets = set(phony[1].replace("\\", " ").split())
    assert targets == set(re.findall(r"^([a-z-]+):.*?## ", text, re.MULTILINE))


def test_ci_runs_what_developers_run():
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip("a source distribution has no CI")
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text()


def test_the_changelog_has_a_place_for_what_comes():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text
    version = PYPROJECT["project"]["version"]
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", text, re.MULTILINE)
    assert all(
        tuple(map(int, r.split("."))) <= tuple(map(int, version.split("."))) for r in released
    )
