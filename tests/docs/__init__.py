"""Documents: what they say is so, and what they say to type works."""

import pytest

pytest.register_assert_rewrite("tests.docs.server_pages", "tests.docs.tool_pages", "tests.docs.scene")
