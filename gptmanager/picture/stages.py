"""Draws the work of a pipeline's stages on micro batches along a time axis."""

from __future__ import annotations

from collections.abc import Sequence

from gptmanager.picture.svg import STYLE, element, label, rect
from gptmanager.simulator.stages import Work

_LEFT, _WIDTH, _ROW, _TOP = 90, 900, 34, 62
_CLASSES = ("context", "generation", "memory", "frame")  # CSS classes of successive micro batches


def draw_stages(work: Sequence[Work], title: str) -> str:
    """Return an SVG of the stages' work. A label "B7" means step 7, of the second micro batch."""
    first, last = min(it.begin for it in work), max(it.end for it in work)
    scale = _WIDTH / (last - first)
    count = 1 + max(it.stage for it in work)
    marks = []
    for stage in range(count):
        own = [it for it in work if it.stage == stage]
        busy = sum(it.end - it.begin for it in own) / (last - first)
        y = _TOP + stage * _ROW
        marks.append(label(_LEFT - 8, y + 17, f"stage {stage}", "end"))
        marks.append(label(_LEFT + _WIDTH + 8, y + 17, f"{busy:.0%} busy", "faint small"))
        for it in own:
            x, width = _LEFT + (it.begin - first) * scale, (it.end - it.begin) * scale
            name = f"{chr(65 + it.micro_batch_id % 26)}{it.iteration}"
            tip = f"stage {stage}: step {it.iteration}, micro batch {it.micro_batch_id}, "
            tip += f"{it.begin * 1000:.1f} to {it.end * 1000:.1f} ms"
            kind = _CLASSES[it.micro_batch_id % len(_CLASSES)]
            marks.append(rect(x, y, width, _ROW - 8, kind, tip, 2))
            if width > 22:
                inside = f"mid small on-{kind}" if kind in _CLASSES[:2] else "mid small"
                marks.append(label(x + width / 2, y + 17, name, inside))
    bottom = _TOP + count * _ROW + 14
    marks.append(label(_LEFT, bottom, f"{first * 1000:.0f} ms", "faint small"))
    marks.append(label(_LEFT + _WIDTH, bottom, f"{last * 1000:.0f} ms", "faint small end"))
    width, height = _LEFT + _WIDTH + 90, bottom + 14
    return element(
        "svg",
        element("style", STYLE),
        rect(0, 0, width, height, "paper"),
        label(16, 30, title, "title"),
        *marks,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        class_="picture",
    )
