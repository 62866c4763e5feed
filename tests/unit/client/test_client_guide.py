"""docs/client.md has the settings with their defaults, and the errors as they are."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from penstock.client import Consumer, Producer, errors
from penstock.client.config import AdminConfig, CommonConfig, ConsumerConfig, ProducerConfig

GUIDE = (Path(__file__).parents[3] / "docs/client.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    section = GUIDE.partition(f"\n### {heading}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    ("heading", "config"),
    [
        ("Every client", CommonConfig),
        ("Producer", ProducerConfig),
        ("Consumer", ConsumerConfig),
        ("Administration", AdminConfig),
    ],
)
def test_the_settings_are_those_that_there_are(heading: str, config: type[CommonConfig]) -> None:
    # The addresses are no setting, and each client's id has another default.
    common = {field.name for field in fields(CommonConfig)} - {"client_id"}
    left_out = {"bootstrap", "client_id"} if config is CommonConfig else common
    wanted = {field.name: field.default for field in fields(config) if field.name not in left_out}
    documented = {
        name.strip("`"): ast.literal_eval(default.strip("`")) for name, default, _ in rows(heading)
    }
    assert documented == wanted
    assert all(meaning for _, _, meaning in rows(heading))


@pytest.mark.parametrize("heading", ["Writing", "Reading", "Either"])
def test_the_errors_are_retriable_or_not_as_it_says(heading: str) -> None:
    table = rows(heading)
    assert table
    for name, retriable, *_ in table:
        error = getattr(errors, name.strip("`"))
        assert retriable == ("yes" if error.retriable else "no"), name


def test_every_error_that_clients_promise_is_explained() -> None:
    explained = {
        row[0].strip("`") for name in ("Writing", "Reading", "Either") for row in rows(name)
    }
    texts = [
        inspect.getdoc(member)
        for client in (Producer, Consumer)
        for member in (client, *vars(client).values())
    ]
    promised = {name for text in texts for name in re.findall(r"\b[A-Z]\w+Error\b", text or "")}
    assert "DeliveryTimeoutError" in promised
    assert promised <= explained


def test_its_links_lead_to_its_own_headings() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in GUIDE.splitlines()
        if line.startswith("#")
    }
    links = set(re.findall(r"\]\(#([^)]+)\)", GUIDE))
    assert links
    assert links <= headings
