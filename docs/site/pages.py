"""A hook of mkdocs: pages that have their source elsewhere in the project.

The manual is mdoc (man/), the changelog and the benchmarks stand where their readers look for them; tables have one
source each: the page of errors is `mqfs.errors`, `<!-- claims -->` `mqfs.state.acks.LIFE`, `<!-- options -->`
mqfs.server.options.Options, `<!-- awaited -->` mqfs.aio and `<!-- campaigns -->` campaigns.csv. Nothing is written to
the sources. A page links to the files of a clone, man/mqfs.4; in the site that is a link to its page.
"""

from __future__ import annotations

import csv
import errno
import inspect
import re
import subprocess
from collections.abc import Callable
from os.path import dirname, normpath, relpath
from pathlib import Path
from typing import Any

import attrs
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import mqfs
from mqfs import aio, errors
from mqfs.http import openapi
from mqfs.http.routes import ROUTES
from mqfs.server.options import Options, print_partner
from mqfs.state import acks

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {
    "CHANGELOG.md": "reference/changelog.md",
    "benchmarks/README.md": "reference/benchmarks.md",
    "mqfs/errors.py": "reference/errors.md",
}
# Of a manual page; else reference/cli.
PLACES = {
    "mqfs.4": "reference/tree.md",
    "mqfs-fq.5": "reference/fq.md",
    "mqfs-http.5": "reference/http.md",
    "mqfs-store.5": "reference/store.md",
}
ERRORS_TEXT = """An error has the same number, text, status and class whichever way it comes: a mount gives the
number, 9P the text, HTTP the status, Python the class. Python, HTTP, the tools and the log have the reason alone; 9P
puts the text before it."""
ERRNO = {**errno.errorcode, errno.EOPNOTSUPP: "EOPNOTSUPP"}
ROUTES_TEXT = "What a running server tells programs at `/.openapi.json`. [mqfs-http(5)](http.md) explains each."
LARGE = 10**12  # a bound that no reader will meet
XREF = re.compile(r'<a class="Xr" href="man:(.*?)">(.*?)</a>')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, text in generated().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    text = re.sub(r"<!-- (\w+) -->", lambda found: TABLES[found[1]](), markdown)
    return turned(text, f"docs/{page.file.src_uri}", page.file.src_uri)


def generated() -> dict[str, str]:
    """The text of each page that is not a file of docs/."""
    pages = {place(path.name): manual(path) for path in sorted((ROOT / "man").glob("*.[1-9]"))}
    pages["index.md"] = home()
    pages["reference/routes.md"] = routes()
    pages["reference/errors.md"] = error_classes()
    pages["reference/changelog.md"] = changelog()
    pages["reference/benchmarks.md"] = moved("benchmarks/README.md", "reference/benchmarks.md")
    return pages


def error_classes() -> str:
    """A row for each class of `mqfs.errors`; what it means and what to do are its docstring."""
    text = f"# Errors\n\n{ERRORS_TEXT}\n"
    text += "\n| class | errno | 9P text | HTTP | meaning | what to do |\n|---|---|---|---|---|---|\n"
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.MqfsError) and kind is not errors.MqfsError:
            meaning, remedy = (" ".join(part.split()) for part in str(inspect.getdoc(kind)).split("\n\n"))
            codes = f"{ERRNO[kind.errno]} | {kind.text} | {kind.http}"
            text += f"| `{name}` | {codes} | {meaning} | {remedy} |\n"
    return text


def routes() -> str:
    """The operations of /.openapi.json by their tags, and what their options are."""
    document = openapi.document(ROUTES)
    text = f"# HTTP routes\n\n{ROUTES_TEXT}\n"
    for tag in document["tags"]:
        text += f"\n## {tag['name'].capitalize()}\n{tag['description']}\n"
        text += "\n| request | | answers | options |\n|---|---|---|---|\n"
        for path, item in document["paths"].items():
            for method, operation in item.items():
                if method != "parameters" and tag["name"] in operation["tags"]:
                    text += _operation(f"{method.upper()} {path}", operation)
    return text + _options(document)


def _operation(request: str, operation: dict[str, Any]) -> str:
    answers = ", ".join(status for status in sorted(operation["responses"]) if status != "default")
    named = ", ".join(f"`{given['name']}`" for given in operation["parameters"] if given["in"] == "query")
    return f"| `{request}` | {operation['summary']} | {answers} | {named} |\n"


def _options(document: dict[str, Any]) -> str:
    """Each option once, or once for each of its meanings."""
    text = "\n## Options and headers\n\n| name | value | | example |\n|---|---|---|---|\n"
    operations = (item[method] for item in document["paths"].values() for method in item if method != "parameters")
    rows = {
        f"| `{given['name']}` | {_values(given['schema'])} | {given['description']} | `{_example(given)}` |\n"
        for operation in operations
        for given in operation["parameters"]
    }
    return text + "".join(sorted(rows, key=str.lower))


def _values(schema: dict[str, Any]) -> str:
    """The words there are, or the type and its bounds."""
    if "enum" in schema:
        return ", ".join(f"`{word}`" for word in schema["enum"] if word)
    if "const" in schema:
        return f"`{schema['const']}`"
    named = (("minimum", "from"), ("maximum", "to"))
    bounds = [f"{word} {schema[key]:,}" for key, word in named if schema.get(key, LARGE) < LARGE]
    return " ".join(["duration" if "pattern" in schema else schema["type"], *bounds])


def _example(given: dict[str, Any]) -> str:
    value = given.get("example", "h-colour=red")
    return str(value[0] if isinstance(value, list) else value)


def moved(source: str, page: str) -> str:
    """The text of a file elsewhere, as that page."""
    return turned((ROOT / source).read_text(), source, page)


def turned(text: str, source: str, page: str) -> str:
    """The text of a source as that page: links to files of the project, of which the site has a page, lead to it."""

    def turn(link: re.Match[str]) -> str:
        target, anchor = normpath(f"{dirname(source)}/{link[1]}".lstrip("/")), link[2] or ""
        if target.startswith("man/"):
            target = place(target.removeprefix("man/"))
        else:
            target = TEXTS.get(target, target.removeprefix("docs/"))
        return f"]({relpath(target, dirname(page))}{anchor})"

    return re.sub(r"\]\((?!\w+:)([^)#]+)(#[^)]*)?\)", turn, text)


def home() -> str:
    """The README up to its recipes, which the tutorial has at length."""
    begin = "**Next:** [the tutorial](tutorial/01-first-messages.md), or [every file of the tree](reference/tree.md).\n"
    return moved("README.md", "index.md").partition("## Recipes")[0] + begin


def place(page: str) -> str:
    return PLACES.get(page, f"reference/cli/{page.rpartition('.')[0]}.md")


def manual(path: Path) -> str:
    """A manual page: its headings as Markdown, for the table of contents, the text below them as mandoc's HTML.

    Mandoc has Markdown, too, but indents the text of long lists as code.
    """
    name, section = path.name.rsplit(".", 1)
    page = subprocess.run(
        ["mandoc", "-T", "html", "-O", "fragment,man=man:%N.%S", str(path)],
        capture_output=True,
        check=True,
        encoding="utf-8",
    ).stdout
    body = page[page.index('<section class="Sh">') : page.rindex("</div>")]
    body = re.sub(r"</?section.*?>\n", "", body)
    body = re.sub(r'<h([12]) class="S." id="(.*?)"><a.*?>(.*?)</a></h.>', _heading, body, flags=re.DOTALL)
    return f"# {name}({section})\n{XREF.sub(lambda link: _link(place(path.name), link), body)}"


def _heading(found: re.Match[str]) -> str:
    level, anchor, title = found.groups()
    name, words = re.sub(r"\W+", "_", anchor).strip("_"), " ".join(title.split())
    return f"\n#{'#' * int(level)} {words.capitalize() if level == '1' else words} {{#{name}}}\n"


def _link(here: str, found: re.Match[str]) -> str:
    """A reference to another page of ours as a link, to any other as its name."""
    if not (ROOT / "man" / found[1]).exists():
        return found[2]
    return f'<a href="{relpath(place(found[1]), dirname(here)).removesuffix(".md")}.html">{found[2]}</a>'


def changelog() -> str:
    """The changelog, with the fragments of what is not released yet."""
    unreleased = "## [Unreleased]\n"
    for kind in ("added", "changed", "fixed"):
        fragments = [path.read_text() for path in sorted((ROOT / "changelog.d").glob(f"*.{kind}.md"))]
        unreleased += f"\n### {kind.title()}\n{''.join(fragments)}" if fragments else ""
    return moved("CHANGELOG.md", "reference/changelog.md").replace("## [Unreleased]\n", unreleased, 1)


def claims() -> str:
    """The life of a message at a consumer, as a table."""
    table = "| state | event | next | recorded step | failed deliveries |\n|---|---|---|---|---|\n"
    for row in acks.LIFE:
        step, failed = row.step.name if row.step else "—", "+ 1" if row.is_counted else ""
        table += f"| {row.state} | {row.event} | {row.next} | {step} | {failed} |\n"
    return table


def options() -> str:
    """The keys of a configuration file, as a table."""
    table = "| key | value | default | meaning | needs one of |\n|---|---|---|---|---|\n"
    for field in attrs.fields(Options):
        key, meta = field.name.replace("_", "-"), field.metadata
        value = "true, false" if meta["kind"] == "flag" else f"`{meta['metavar']}`"
        value = f"list of {value}" if meta["kind"] == "list" else value
        default = {None: "none", (): "none", False: "false"}.get(field.default, f"`{field.default}`")
        needs = ", ".join(f"`{print_partner(name).removeprefix('--')}`" for name in meta.get("needs", "").split())
        cells = [f"`{key}`", value, default, meta["help"].removesuffix(" Repeatable."), needs]
        table += f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
    return table


def campaigns() -> str:
    with open(ROOT / "docs" / "explanation" / "campaigns.csv", newline="") as file:
        head, *rows = csv.reader(file)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def awaited() -> str:
    """The classes of `mqfs.aio`, as a table; parameters are those of their twins, to whose descriptions it links."""
    table = "| class | twin | awaited | opened: awaited, entered or iterated | called |\n|---|---|---|---|---|\n"
    for kind in [getattr(aio, name) for name in aio.__all__ if name.startswith("Async")]:
        twin = kind.__name__.removeprefix("Async")
        twin = {"Writer": "client.BodyWriter"}.get(twin, twin)
        cells: list[list[str]] = [[], [], []]
        for name, member in vars(kind).items():
            if name[0] != "_" and inspect.isfunction(member):
                is_opening = "opens." in member.__code__.co_qualname
                link = f"[`{name}`](#mqfs.{twin}.{name})" if hasattr(getattr(mqfs, twin, None), name) else f"`{name}`"
                cells[1 if is_opening else 0 if inspect.iscoroutinefunction(member) else 2].append(link)
        table += f"| `aio.{kind.__name__}` | `mqfs.{twin}` | {' | '.join(map(', '.join, cells))} |\n"
    return table


TABLES: dict[str, Callable[[], str]] = {
    "claims": claims, "options": options, "campaigns": campaigns, "awaited": awaited,
}  # fmt: skip
