"""Pages in headless Chromium: what a script in them has seen."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--enable-logging=stderr", "--dump-dom", "--window-size=1400,1000"),
)
# The contrast of an element's text to what is behind it, as WCAG defines it, and whether an element shows text.
CONTRAST = r"""
const channels = (color) => color.match(/[\d.]+/g).map(Number);
function background(element) {
  let layers = [];
  for (let one = element; one; one = one.parentElement) {
    const [r, g, b, a = 1] = channels(getComputedStyle(one).backgroundColor);
    layers.push([r, g, b, a]);
    if (a === 1) break;
  }
  return layers.reverse().reduce((below, [r, g, b, a]) => [r, g, b].map((v, i) => v * a + below[i] * (1 - a)),
                                 [255, 255, 255]);
}
const luminance = (rgb) => rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
function contrast(element) {
  const pair = [channels(getComputedStyle(element).color).slice(0, 3), background(element)].map(luminance);
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
}
const hasText = (element) => element.checkVisibility({visibilityProperty: true, opacityProperty: true})
  && [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
"""


def look(
    path: Path, profile: Path, *flags: str, virtual_secs: int = 2, timeout_secs: float = 90.0
) -> tuple[Any, list[str]]:
    """What the page has written as JSON into its element "seen", and what the browser has written to its console.

    Args:
        profile: a folder for the browser's own files.
        virtual_secs: how long the page has, by a clock that stands still while files are loaded.
    """
    if CHROMIUM is None:
        pytest.skip("there is no chromium; Debian's package of that name is enough")
    options = [*flags, f"--user-data-dir={profile}", f"--virtual-time-budget={virtual_secs * 1000}"]
    completed = subprocess.run(
        [CHROMIUM, *FLAGS, *options, path.as_uri()], capture_output=True, text=True, timeout=timeout_secs
    )
    match = re.search(r'<pre id="seen">(.+?)</pre>', completed.stdout, re.DOTALL)
    assert match, completed.stdout[-500:] + completed.stderr[-2000:]
    console = [line for line in completed.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(match[1])), console
