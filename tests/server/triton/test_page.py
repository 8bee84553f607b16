"""docs/triton.md knows every tensor, and no others."""

import re
from pathlib import Path

import pytest

from gptmanager.server.triton import text_model, token_model

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "triton.md").read_text(encoding="utf-8")


def section(title):
    return PAGE.partition(f"### {title}\n")[2].partition("\n##")[0]


@pytest.mark.parametrize(
    "title, tensors",
    [
        ("Inputs of tensorrt_llm", token_model.INPUTS),
        ("Inputs of the text models", text_model.BLS_INPUTS),
        ("Outputs", {**token_model.OUTPUTS, **text_model.OUTPUTS}),
    ],
)
def test_every_tensor_is_documented(title, tensors):
    rows = [line.split("|") for line in section(title).splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert told <= set(tensors)
    written = set(re.findall(r"`(\w+)`", section(title)))
    if title == "Inputs of the text models":  # it leaves out what the first table has
        written |= {name for name in tensors if name in token_model.INPUTS}
    assert set(tensors) <= written
    for row in rows:
        datatypes = set(re.findall(r"\b(INT32|FP32|FP16|BF16|UINT64|UINT8|BOOL|BYTES)\b", row[2]))
        assert {tensors[name].datatype for name in re.findall(r"`(\w+)`", row[1])} <= datatypes
