"""Plugin libraries that `make plugins` built (skipped without)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trt.plugins.host import Host

BUILT = Path(__file__).resolve().parents[3] / "build" / "plugins"


def adapters() -> list[tuple[str, Path]]:
    """The libraries at hand, each with the driver for its adapter."""
    found = []
    for library in (BUILT / "libstof_plugins.so", BUILT / "libstof_plugins_v2.so"):
        if library.is_file():
            version = "v3" if b"\0getCreators\0" in library.read_bytes() else "v2"
            found.append((version, library))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "host" in metafunc.fixturenames:
        found = adapters()
        metafunc.parametrize("host", found or [None], ids=[version for version, _ in found] or ["none"], indirect=True)


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    if request.param is None:
        pytest.skip("needs `make plugins`")
    version, path = request.param
    loaded = Host(BUILT / f"libhost_{version}.so", path)
    yield loaded
    loaded.close()
