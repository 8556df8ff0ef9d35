"""Download the raw files of a data set from the first of its mirrors that works."""

import threading
import time
import urllib.request
import zlib
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from utils import signals
from utils.datasets.idx import read_verified
from utils.datasets.sources import CHECKSUMS, RAW_FILES, SOURCES, DataError
from utils.files import POLL_SECONDS, replace_file

PROBE_TIMEOUT = 6.0  # seconds; offline, the whole start has to end within 10
DOWNLOAD_TIMEOUT = 240.0  # seconds for each mirror: a slow line needs minutes for 11 to 30 MB


def download(name: str, folder: Path) -> None:
    """Put the four raw files of a data set into ``folder``, verified and unpacked.

    Args:
        name: a key of ``SOURCES``.
        folder: made where it is not there.

    Raises:
        DataError: no mirror could be reached, or none had the published files.
        OSError: the folder cannot be made.
    """
    source = SOURCES[name]
    folder.mkdir(parents=True, exist_ok=True)

    def probe(mirror: str) -> None:
        request = urllib.request.Request(f"{mirror}{RAW_FILES[3]}.gz", method="HEAD")
        urllib.request.urlopen(request, timeout=PROBE_TIMEOUT).close()

    def fetch(mirror: str) -> None:
        for file_name in RAW_FILES:
            url, sha256 = f"{mirror}{file_name}.gz", CHECKSUMS[f"{source.folder}/raw/{file_name}"]
            with urllib.request.urlopen(url, timeout=PROBE_TIMEOUT) as response:
                replace_file(folder / file_name, read_verified(response, True, sha256))

    problems = _try_each(source.mirrors, probe, PROBE_TIMEOUT)
    for mirror in source.mirrors:
        if problems[mirror] is None:
            problems |= _try_each((mirror,), fetch, DOWNLOAD_TIMEOUT)
        if problems[mirror] is None:
            return
    tried = "; ".join(f"{mirror} ({problem})" for mirror, problem in problems.items())
    raise DataError(
        f"no {source.folder} in {folder}, and it cannot be downloaded: {tried}. Put"
        f" {', '.join(RAW_FILES)} (or their .gz) there, or use --dataset synthetic"
    )


def _try_each(
    mirrors: tuple[str, ...], attempt: Callable[[str], None], seconds: float
) -> dict[str, str | None]:
    """Call ``attempt`` for all mirrors at once; return each one's problem, or None.

    In threads that may be left behind: a resolver without a network ignores every timeout, and one
    byte now and then keeps a connection alive for ever.
    """
    problems: dict[str, str | None] = dict.fromkeys(mirrors, f"nothing in {seconds:.0f} s")

    def run(mirror: str) -> None:
        try:
            attempt(mirror)
            problems[mirror] = None
        except (OSError, EOFError, zlib.error, HTTPException, ValueError) as error:
            problems[mirror] = str(getattr(error, "reason", error)).partition("\n")[0]

    threads = [threading.Thread(target=run, args=(m,), daemon=True) for m in mirrors]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        signals.sleep(POLL_SECONDS)
    return dict(problems)
