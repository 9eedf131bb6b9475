from __future__ import annotations

import pytest

from envbus.runner.extras import how_to_install


@pytest.mark.parametrize(
    ("extra", "package"), [("parquet", "pyarrow"), ("video", "imageio-ffmpeg")]
)
def test_what_is_missing_is_named_as_it_can_be_installed(extra: str, package: str) -> None:
    told = how_to_install(extra)
    assert f"'{package}>=" in told
    assert f"pip install -e '.[{extra}]' in a clone" in told
