"""What the documentation says is what the code does, where that can be compared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.config import describe_keys
from penstock.wire.topic_config import TOPIC_CONFIGS
from tests.unit.cli.command_line import complaints

ROOT = Path(__file__).parents[3]
CONFIGURATION = (ROOT / "docs/operating/configuration.md").read_text(encoding="utf-8")


def row(key: str, default: str, meaning: str) -> str:
    shown = f"`{default}`" if default not in ("", "-1") or key == "retention.bytes" else "-"
    return f"| `{key}` | {shown} | {meaning} |"


@pytest.mark.parametrize(("key", "default", "meaning"), list(describe_keys()))
def test_every_setting_of_a_node_is_documented_as_it_is(
    key: str, default: str, meaning: str
) -> None:
    assert row(key, default, meaning) in CONFIGURATION


@pytest.mark.parametrize("key", list(TOPIC_CONFIGS))
def test_every_config_of_a_topic_is_documented_as_it_is(key: str) -> None:
    entry = TOPIC_CONFIGS[key]
    assert row(key, entry.default, entry.documentation) in CONFIGURATION


def test_nothing_is_documented_that_is_not_there() -> None:
    keys = {key for key, _, _ in describe_keys()} | set(TOPIC_CONFIGS)
    documented = re.findall(r"^\| `([a-z.]+)` \|", CONFIGURATION, re.MULTILINE)
    assert set(documented) == keys
    assert len(documented) == len(keys)


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def commands(page: Path) -> Iterator[str]:
    """Every ``penstock ...`` of a page that is a line to type, or stands in quotation marks."""
    text = re.sub(r"\\\n *", "", page.read_text(encoding="utf-8"))
    text = re.sub(r"\\\|[a-z|\\-]*", "", text)  # Of alternatives in a table the first.
    for match in re.finditer(r"(?:^\$ |`)(penstock [^#|\n`]+)", text, re.MULTILINE):
        yield match.group(1).strip()


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_the_documentation_exist(page: Path) -> None:
    wrong = [complaint for line in commands(page) for complaint in complaints(line)]
    assert wrong == []


def test_the_readme_shows_commands() -> None:
    assert len(list(commands(ROOT / "README.md"))) > 20
