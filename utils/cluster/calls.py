"""Calls that end in time, whatever a store or a resolver does."""

import threading
import time
from concurrent.futures import Future, wait
from typing import Any

POLL_SECONDS = 0.05


def call_within(seconds: float, function: Any, *args: Any, check: Any = lambda: None) -> Any:
    """Return ``function(*args)``, called in a thread that is left behind if it does not return.

    PyTorch's stores wait without a limit for a host that is stopped. Resolvers wait for minutes.

    Args:
        seconds: to wait at most.
        check: called now and then during the wait. An exception in it ends the wait.

    Raises:
        TimeoutError: the function has not returned in time.
    """
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    deadline = time.monotonic() + seconds
    threading.Thread(target=work, daemon=True).start()
    # The end of the function is seen at once. Only ``check`` may wait a little longer.
    while not wait([future], 4 * POLL_SECONDS).done:
        check()
        if time.monotonic() > deadline:
            raise TimeoutError("no answer")
    return future.result()
