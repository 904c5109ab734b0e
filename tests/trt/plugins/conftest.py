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
    for fixture in ("host", "region_host"):
        if fixture in metafunc.fixturenames:
            found = adapters()
            ids = [version for version, _ in found] or ["none"]
            metafunc.parametrize(fixture, found or [None], ids=ids, indirect=True)


def loaded(request: pytest.FixtureRequest, name: str) -> Iterator[Host]:
    if request.param is None:
        pytest.skip("needs `make plugins`")
    version, path = request.param
    host = Host(BUILT / f"libhost_{version}.so", path, name)
    yield host
    host.close()


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    yield from loaded(request, "StofAttention")


@pytest.fixture
def region_host(request: pytest.FixtureRequest) -> Iterator[Host]:
    yield from loaded(request, "StofFusedRegion")
