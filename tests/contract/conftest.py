from __future__ import annotations

import pytest

# So that a failed `assert` of the suite tells the values.
pytest.register_assert_rewrite("envbus.runner.testing")
