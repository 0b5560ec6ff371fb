"""The texts of errors: `what failed: reason (expected ...)`, as in docs/contributing/style.md."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mqfs import errors
from tests.house.today import check, name_of, sources

CLASSES = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.MqfsError)}
CLASSES |= {"BadParameter", "UsageError", "Malformed", "Refused", "ValueError", "TypeError"}
CLASSES |= {"ToolError", "OptionError", "CommandError", "SinkError"}
# Errors about a wrong value: their texts say which was expected.
OF_A_VALUE = {"BadName", "BadCommand", "BadConfig", "BadAddress", "BadParameter", "UsageError"}

VALUE = "{}"
SHAPE = re.compile(r": |\((?:expected|\w+ing |\w)|^(?:cannot|no|unknown|reserved|invalid|not) ")
HINT = re.compile(r"\(|; did you mean")
DIALECT = re.compile(
    r"\bis no\b|\bare no\b|\bthere (?:are:|is no\b)|\btakes?\b|\bstands?\b|\bbehind\b|\bmatter\b|\bunit\b|\bend mark\b"
    r"|\bthis one\b|\bthese are\b|\bgoes\b|\bgone\b|\bwent\b|\bmust be\b|\blacks\b|\b(?:has|have) at most\b|^at most\b"
    r"|; (?:write|take|run|see|use|name|open|remove|try|end)\b|\.$"
)
NAMES = {"ENOSPC", "EOF", "HTTP", "JSON", "TLS", "UTF-8", "Tattach", "Tread", "Twrite"}
SHORT_WORDS = 7


def text_of(node: ast.expr) -> str | None:
    """Return a literal or formatted text, with {} for each value; None if the text is made elsewhere."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return left + right if left is not None and right is not None else None
    return None


def texts(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, class and text of each error that a source makes with a literal text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args:
            kind = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if kind == "Refused" and name_of(path).startswith("mqfs/fq/"):
                continue  # the texts of fqd, unchanged: its clients compare them
            for form in forms(node.args[0]):
                if kind in CLASSES and (text := text_of(form)):
                    yield node.lineno, kind, text


def forms(node: ast.expr) -> Iterator[ast.expr]:
    """Yield both sides of a conditional expression, or the expression itself."""
    if isinstance(node, ast.IfExp):
        yield from (*forms(node.body), *forms(node.orelse))
    else:
        yield node


def is_wrong(kind: str, text: str) -> bool:
    """Whether a text has a word of the dialect, is a sentence, or omits what failed, why, or what was expected."""
    if DIALECT.search(text) or (text[0].isupper() and text.split()[0].rstrip(":") not in NAMES):
        return True
    if text == VALUE or text.startswith(f"{VALUE}: {VALUE}"):
        return False
    says_why = ": " in text.removeprefix(f"{VALUE}: ") or HINT.search(text) is not None
    if kind in OF_A_VALUE and VALUE in text and not says_why:
        return True
    return SHAPE.search(text) is None and (VALUE in text or len(text.split()) > SHORT_WORDS)


def wrong() -> Iterator[tuple[str, int, str, str]]:
    for path in sources():
        for line, kind, text in texts(path):
            if is_wrong(kind, text):
                yield name_of(path), line, kind, text


def breaches() -> dict[str, int]:
    return dict(Counter(where for where, _, _, _ in wrong()))


def test_errors_say_what_failed_why_and_what_was_expected() -> None:
    check("errors", breaches())


if __name__ == "__main__":
    for where, line, kind, text in wrong():
        print(f"{where}:{line}: {kind}: {text}")
