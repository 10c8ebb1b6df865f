"""The rest of a call that is not as recorded: it is recorded from where it began to differ.

What came before was verified and is held as planned. Without this everything that follows would be
held, and the step that differs would be the one that runs out of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from recollect._torch.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks
from recollect.replay.held_tensor import Ticket
from recollect.replay.record import Recorder
from recollect.replay.recording import Recording
from recollect.replay.rematerialize import Recall

__all__ = ["Rest"]


class Rest:
    """Records until it is left. To be entered in the midst of a call, inside of its hooks."""

    def __init__(
        self, recorder: Recorder, pack: Callable[[torch.Tensor], Ticket], recall: Recall
    ) -> None:
        self._recorder = recorder
        self._pack = pack
        self._recall = recall

    def __enter__(self) -> None:
        push_saved_tensor_hooks(self._pack, self._recall.unpack)
        try:
            self._recorder.__enter__()
        except BaseException:
            pop_saved_tensor_hooks()
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            self._recorder.__exit__(*exc)
        finally:
            pop_saved_tensor_hooks()

    def pause(self) -> AbstractContextManager[Any]:
        """A context whose ops are none of the region's."""
        return self._recorder.pause()

    def finish(self, result: Any) -> Recording:
        """After the call, which returned ``result``."""
        return self._recorder.finish(result)
