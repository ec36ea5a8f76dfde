"""Records internal errors (bugs) of the emulated cloud in the log and in the state."""

import asyncio
import logging
import traceback

from controller.localcloud.http.errors import ApiError
from controller.localcloud.store import Store

ERROR_KIND = "mistake"


def record_error(store: Store, name: str, error: BaseException) -> None:
    """Record an error and its traceback under the name of the failed operation."""
    logging.error("%s failed", name, exc_info=error)
    store.put(ERROR_KIND, name, {"traceback": "".join(traceback.format_exception(error))})


def record_task_error(store: Store, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        record_error(store, task.get_name(), error)


def internal_error(error: BaseException) -> ApiError:
    return ApiError(500, f"Internal error of the emulated cloud: {error!r}; see server.log in its state folder")
