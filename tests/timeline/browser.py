"""A page in headless Chromium: its DOM after the scripts have run, and a screenshot as pixels."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def executable() -> str:
    """The browser; without one the test is skipped, in CI it fails."""
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None and os.environ.get("CI"):
        pytest.fail("no Chromium: .ci/run installs it")
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    return found


def dom(page: Path, fragment: str = "", width: int = 1500) -> str:
    """The document as text after its scripts have run."""
    return _chromium(page, fragment, width, "--dump-dom")


def screenshot(page: Path, target: Path, fragment: str = "", width: int = 1500, *more: str) -> list[bytes]:
    """Rows of RGB pixels of the first 900 lines of the page, as they were written to ``target`` (PNG)."""
    _chromium(page, fragment, width, f"--screenshot={target}", *more)
    return _pixels(target.read_bytes())


def _chromium(page: Path, fragment: str, width: int, *more: str) -> str:
    address = page.resolve().as_uri() + (f"#{fragment}" if fragment else "")
    command = [executable(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               "--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}",
               f"--window-size={width},900", *more, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    faults = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not faults, faults
    return done.stdout


def _pixels(png: bytes) -> list[bytes]:
    """Decode an 8-bit RGB or RGBA image without interlace (PNG specification, filters of section 9.2)."""
    at, packed, width, depth = 8, b"", 0, 0
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, _, bits, colour, _, _, interlace = struct.unpack(">IIBBBBB", body)
            assert (bits, interlace) == (8, 0)
            depth = {2: 3, 6: 4}[colour]
        packed += body if kind == b"IDAT" else b""
        at += 12 + size
    raw, stride, last, rows = zlib.decompress(packed), width * depth, bytes(width * depth), []
    for start in range(0, len(raw), stride + 1):
        last = _unfilter(raw[start], raw[start + 1 : start + 1 + stride], last, depth)
        rows.append(b"".join(last[i : i + 3] for i in range(0, stride, depth)))
    return rows


def _unfilter(kind: int, line: bytes, above: bytes, depth: int) -> bytes:
    out = bytearray(line)
    for i in range(len(out)):
        left = out[i - depth] if i >= depth else 0
        corner = above[i - depth] if i >= depth else 0
        if kind == 4:
            guess = left + above[i] - corner
            best = min((left, above[i], corner), key=lambda value: abs(guess - value))
            out[i] = (out[i] + best) & 255
        else:
            out[i] = (out[i] + (0, left, above[i], (left + above[i]) // 2)[kind]) & 255
    return bytes(out)
