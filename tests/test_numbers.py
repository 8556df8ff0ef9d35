"""The arithmetic of docs/numbers.md: every figure that follows from others is computed again."""

import math
import re

import pytest
import scaling

from tests.documents import rows, section
from tests.processes import ROOT

PAGE = ROOT / "docs" / "numbers.md"
GB = {"10 million": 0.01, "1 billion": 1, "7 billion": 7, "70 billion": 70}  # of one byte each


def tables(title):
    """Return the rows of all tables of a section."""
    found = rows(section(PAGE, title).text)
    assert len(found) > 2
    return found


def number(text):
    return float(re.sub(r"[^\d.]", "", text))


def test_bytes_of_a_parameter_and_what_is_sent():
    told = {row[0]: row[1:] for row in tables("When to leave DDP")}
    divided = {"DDP": 0, "ZeRO-1": 12, "ZeRO-2": 14, "FSDP": 16}
    for technique, part in divided.items():
        formula, of_eight, sent = told[technique]
        terms = [term.split("/") for term in formula.split(" + ")]  # such as 4 + 12/n
        by_formula = sum(float(size) / (8 if n else 1) for size, *n in terms)
        assert by_formula == float(of_eight) == 16 - part + part / 8, technique
        # A reduce-scatter, an all-gather, and with FSDP the all-gather of the forward.
        assert number(sent) == (3 if technique == "FSDP" else 2)


def test_what_fits_on_a_gpu():
    found = {row[0]: row for row in tables("When to leave DDP") if row[0] in GB}
    assert found.keys() == GB.keys()
    head = next(row for row in tables("When to leave DDP") if row[0] == "parameters")
    for name, (_, whole, *cells) in found.items():
        assert number(whole) == 16 * GB[name]
        for memory, cell in zip(map(number, head[2:]), cells, strict=True):
            gpus = math.ceil(3 * 16 * GB[name] / (2 * memory))  # a third is left for activations
            assert cell == ("DDP" if gpus == 1 else f"FSDP, {gpus}"), (name, memory)


def test_links_and_speed_ups():
    """By the formulas of scripts/tools/scaling.py, on 8 devices."""
    found = tables("Will it get faster?")
    bandwidth = {}
    for link, speed, time in (row for row in found if len(row) == 3 and row[2].endswith(" ms")):
        if not link.startswith("["):
            bandwidth[link.removeprefix("Ethernet, ")] = float(speed)
        seconds = 2 * 7 / 8 * 102e6 / (1e9 * float(speed))
        assert number(time) == pytest.approx(1e3 * seconds, rel=0.06), link
    bandwidth |= {"NVLink 3": 300, "100 Gb/s": 12.5}
    seconds, size = 0.0, 0.0
    checked = 0
    for model, link, during, after in (row for row in found if row[1] in bandwidth):
        if model:
            seconds, size = (0.273, 102e6) if "ResNet" in model else (0.788, 4e9)
            assert f"{1e3 * seconds:.0f} ms" in model
        step, way = scaling.even_step(seconds, size), scaling.Link(10e-6, 1e9 * bandwidth[link])
        assert float(during) == round(8 * seconds / step.ddp(8, way), 2), (model, link)
        assert float(after) == round(8 * seconds / step.ddp_after(8, way), 2), (model, link)
        checked += 1
    assert checked == 6
