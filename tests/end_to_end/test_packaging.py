"""What an installed wheel carries: the package, typed, and the whole catalog."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from paleo.specs.catalog import CATALOG_FOLDERS

ROOT = Path(__file__).resolve().parents[2]


def test_the_wheel_holds_the_package_and_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("hatchling.build")
    monkeypatch.chdir(ROOT)
    held = set(zipfile.ZipFile(tmp_path / build.build_wheel(str(tmp_path))).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "paleo").rglob("*.py")}
    catalog = {
        f"paleo/_data/{folder}/{path.name}"
        for folder in CATALOG_FOLDERS.values()
        for path in (ROOT / folder).glob("*.yaml")
    }
    assert modules | catalog | {"paleo/py.typed"} <= held
    assert len(catalog) > 200
    stray = [name for name in held if not name.startswith(("paleo/", "paleo_perf-"))]
    assert stray == []
