"""The site of docs/: it builds without a warning, loads nothing from elsewhere, and has every page of the manual."""

from __future__ import annotations

import csv
import errno
import os
import re
import subprocess
import sys
from datetime import date
from html import unescape
from pathlib import Path

import attrs
import pytest

from mqfs import aio, errors
from mqfs.http.openapi import template
from mqfs.http.routes import ROUTES
from mqfs.server.options import Options
from mqfs.state.acks import LIFE
from pyspark_mqfs.options import READ
from tests.docs.pages import PAGES
from tests.support import ROOT

WRITE = ("topic", "txnAppId", "txnVersion", "create", "reservedHeaders", "largeBatches")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/site/mkdocs.yml", "-d", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def shown(page: Path) -> str:
    """The text that a reader of the page sees."""
    return " ".join(unescape(re.sub("<[^>]*>", " ", page.read_text())).split())


def test_each_class_for_async_programs_is_on_the_page_of_the_library(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text()
    for name in aio.__all__:
        if name.startswith("Async"):
            assert f"<code>aio.{name}</code>" in page
    assert '<a href="#mqfs.Group.publish"><code>publish</code></a>' in page


def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
        assert [tag for tag in tags if re.search(r"(?:src|href)=.?(?:https?:)?//", tag)] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(.?https?:", style.read_text()), style


@pytest.mark.parametrize("source", PAGES, ids=lambda page: page.name)
def test_a_page_of_the_manual(source: Path, site: Path) -> None:
    name, _, section = source.name.rpartition(".")
    places = {"mqfs.4": "tree", "mqfs-fq.5": "fq", "mqfs-http.5": "http", "mqfs-store.5": "store"}
    place = places.get(source.name, f"cli/{name}")
    page = site / "reference" / f"{place}.html"
    text = shown(page)
    assert f"{name}({section})" in text
    assert not re.search(r"<dl|\{#", text), "mdoc or Markdown shows through"
    for title in re.findall(r"^\.S[hs] (.+)$", source.read_text(), re.MULTILINE):
        assert title.replace('"', "").split()[0].lower() in text.lower(), title


def test_the_life_of_a_message(site: Path) -> None:
    def letters(text: str) -> str:
        return re.sub(r"\W", "", text)

    text = letters(shown(site / "explanation" / "delivery-guarantees.html"))
    for row in LIFE:
        assert letters(f"{row.state} {row.event} {row.next} {row.step.name if row.step else ''}") in text


def test_every_route_and_option_of_http(site: Path) -> None:
    text = shown(site / "reference" / "routes.html")
    for route in ROUTES:
        assert f" {route.method} {template(route.path)} " in text, route
        assert all(f" {name} " in text for name in route.options), route


def test_every_error_with_its_codes_and_what_to_do(site: Path) -> None:
    def letters(text: str) -> str:
        return re.sub(r"\W", "", text)

    text = letters(shown(site / "reference" / "errors.html"))
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.MqfsError) and kind is not errors.MqfsError:
            number = errno.errorcode[kind.errno].replace("ENOTSUP", "EOPNOTSUPP")
            meaning, remedy = str(kind.__doc__).split("\n\n")
            assert letters(f"{name} {number} {kind.text} {kind.http} {meaning} {remedy}") in text, name


def test_the_home_page_is_the_readme(site: Path) -> None:
    assert "A durable message broker whose API is the file system" in shown(site / "index.html")
    assert (site / "terminal.svg").exists()


def test_every_option_of_spark_is_there() -> None:
    text = (ROOT / "docs" / "reference" / "spark-options.md").read_text()
    for option in (*READ, *WRITE):
        assert f"\n| `{option}` |" in text, option


def test_every_key_of_the_configuration_is_there(site: Path) -> None:
    text = shown(site / "reference" / "configuration.html")
    for field in attrs.fields(Options):
        assert f" {field.name.replace('_', '-')} " in text, field.name
        assert field.metadata["help"].removesuffix(" Repeatable.").split(".")[0].split("*")[0] in text, field.name


def test_campaigns_name_their_tests_and_are_brief(site: Path) -> None:
    text = shown(site / "explanation" / "reliability.html")
    with open(ROOT / "docs" / "explanation" / "campaigns.csv", newline="") as file:
        for row in csv.DictReader(file):
            assert row["campaign"] in text
            assert row["where"] == "by hand" or (ROOT / row["where"]).exists(), row
            assert date.fromisoformat(row["last whole run"])
            assert all(len(cell) <= 160 for cell in row.values()), row
