"""Kernels that come with the image."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.replay.kernel_cache import lay_out_kernels


def test_shipped_kernels_are_laid_where_numba_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shipped" / "replay").mkdir(parents=True)
    (tmp_path / "shipped" / "replay" / "kernel.nbi").write_text("compiled")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    assert lay_out_kernels(tmp_path / "shipped")
    assert (tmp_path / "cache" / "replay" / "kernel.nbi").read_text() == "compiled"
    (tmp_path / "cache" / "replay" / "kernel.nbi").write_text("newer")
    assert not lay_out_kernels(tmp_path / "shipped")
    assert (tmp_path / "cache" / "replay" / "kernel.nbi").read_text() == "newer"


def test_outside_an_image_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    assert not lay_out_kernels(tmp_path / "nowhere")
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert not lay_out_kernels(tmp_path)
    assert not (tmp_path / "cache").exists()


def test_laid_out_kernels_are_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled in one directory is used from its copy in another."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "shipped")}
    compile_ = [sys.executable, "-m", "services.replay.compile"]
    subprocess.run(compile_, env=environment, check=True, timeout=120)
    shipped = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "shipped").rglob("*.nb*")}
    assert shipped
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    lay_out_kernels(tmp_path / "shipped")
    subprocess.run(compile_, env={**os.environ}, check=True, timeout=120)
    laid_out = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.nb*")}
    assert laid_out == shipped
