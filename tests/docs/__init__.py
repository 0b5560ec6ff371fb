"""Documents: what they say is so, and what they say to type works."""

import pytest

MODULES = ("fq_pages", "http_pages", "scene", "server_pages", "shell", "spark_pages", "tool_pages", "typed")
pytest.register_assert_rewrite(*(f"tests.docs.{name}" for name in MODULES))
