"""Download the raw files of a data set from the first of its mirrors that works."""

import gzip
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from utils import signals
from utils.datasets.idx import verify
from utils.datasets.sources import RAW_FILES, SOURCES, DataError
from utils.files import POLL_SECONDS, replace_file

PROBE_TIMEOUT = 6.0  # seconds. Offline, the whole start has to end within 10
DOWNLOAD_TIMEOUT = 240.0  # seconds for each mirror. A slow line needs minutes for 11 to 30 MB
MAX_BYTES = 2**26  # of a raw file. The largest has 47 MB, but a small .gz may unpack to terabytes


def download(name: str, folder: Path) -> None:
    """Put the four raw files of a data set into ``folder``, verified and unpacked.

    The first mirror is the folder itself, for a .gz that somebody put there.

    Args:
        name: a key of ``SOURCES``.
        folder: ``.../FOLDER/raw``.

    Raises:
        DataError: no mirror could be reached, or none had the published files.
        OSError: a file cannot be written.
        Stopped: a stop signal came.
    """
    mirrors = (f"{folder.resolve().as_uri()}/", *SOURCES[name].mirrors)
    contents: dict[str, bytes] = {}

    def probe(mirror: str) -> None:
        request = urllib.request.Request(f"{mirror}{RAW_FILES[3]}.gz", method="HEAD")
        urllib.request.urlopen(request, timeout=PROBE_TIMEOUT).close()

    def fetch(mirror: str) -> None:
        for file_name in RAW_FILES:
            url = f"{mirror}{file_name}.gz"
            with (
                urllib.request.urlopen(url, timeout=PROBE_TIMEOUT) as packed,
                gzip.open(packed) as unpacked,
            ):
                content = unpacked.read(MAX_BYTES)
            verify(content, folder / file_name)
            contents[file_name] = content

    problems = _try_each(mirrors, probe, PROBE_TIMEOUT)
    for mirror in mirrors:
        if problems[mirror] is None:
            problems |= _try_each((mirror,), fetch, DOWNLOAD_TIMEOUT)
        if problems[mirror] is None:
            for file_name, content in contents.items():
                replace_file(folder / file_name, content)
            return
    tried = "; ".join(f"{mirror} ({problem})" for mirror, problem in problems.items())
    raise DataError(
        f"no {SOURCES[name].folder} in {folder}, and it cannot be downloaded: {tried}. Put"
        f" {', '.join(RAW_FILES)} (or their .gz) there, or use --dataset synthetic"
    )


def _try_each(
    mirrors: tuple[str, ...], attempt: Callable[[str], None], seconds: float
) -> dict[str, str | None]:
    """Call ``attempt`` for all mirrors at once; return each one's problem, or None.

    The calls run in threads, which may be left behind. A resolver without a network ignores every
    timeout, and one byte now and then keeps a connection alive for ever.
    """
    problems: dict[str, str | None] = dict.fromkeys(mirrors, f"nothing in {seconds:.0f} s")

    def run(mirror: str) -> None:
        try:
            attempt(mirror)
            problems[mirror] = None
        except Exception as error:  # of sockets, HTTP, gzip and the checksum
            problems[mirror] = str(getattr(error, "reason", error)).partition("\n")[0]

    threads = [threading.Thread(target=run, args=(m,), daemon=True) for m in mirrors]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        signals.sleep(POLL_SECONDS)
    return dict(problems)
