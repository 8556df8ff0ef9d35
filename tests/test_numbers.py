"""The arithmetic of docs/numbers.md: every figure that follows from others is computed again."""

import importlib.util
import math
import re
import sys

import pytest

from tests.documents import rows, section, sections
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


def load(path):
    """Import a script by its path, beside which it finds its own modules."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scaling():
    return load(ROOT / "scripts" / "tools" / "scaling.py")


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
            gpus = math.ceil(16 * GB[name] / memory)
            assert cell == ("DDP" if gpus == 1 else f"FSDP, {gpus}"), (name, memory)


def test_the_picture_has_the_bytes_of_the_table():
    picture = (ROOT / "docs" / "memory.svg").read_text()
    for row in tables("When to leave DDP")[1:5]:
        assert f">{row[2]} bytes<" in picture, row


def test_links_and_speed_ups(scaling):
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


def test_what_a_step_loses():
    text = " ".join(section(PAGE, "Measured on two cores").text.split())
    divisions = re.findall(r"(\d+) / ([\d,]+) = ([\d.]+) ms", text)
    assert len(divisions) == 4
    for images, speed, told in divisions:
        assert float(told) == pytest.approx(1e3 * int(images) / number(speed), abs=0.6)
    (large, small) = re.findall(r"= ([\d.]+) ms\. So it lost ([\d.]+) ms", text)
    halves = [
        float(half) for half in re.findall(r"(?:Half of that is|half of that is) ([\d.]+) ms", text)
    ]
    for half, (took, lost) in zip(halves, (large, small), strict=True):
        assert float(took) - half == pytest.approx(float(lost), abs=0.05)
    found = {row[0]: row for row in tables("Measured on two cores")}
    alone = number(found["one core"][2])
    for row in list(found.values())[1:]:
        assert float(row[4]) == pytest.approx(number(row[2]) / alone, abs=0.01)


def test_a_cell_is_short():
    for part in sections(PAGE):
        for cell in (cell for row in rows(part.text) for cell in row):
            assert len(re.sub(r"\]\([^)]*\)", "]", cell).split()) <= 15, cell
