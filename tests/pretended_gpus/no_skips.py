"""A plugin for pytest: nothing is missing where GPUs are pretended, so no test may be skipped."""

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, although GPUs are pretended: {report.longrepr}"
    return report
