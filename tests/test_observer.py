"""Engines report to the observer of their thread, if there is one."""

import io
import threading

import torch

import recollect
from recollect.observer import observed_pack, observing


def test_without_an_observer_hooks_are_as_they_are():
    assert observing.observer is None
    assert observed_pack(len) is len


def test_regions_of_other_threads_are_not_observed():
    x = torch.ones(4, requires_grad=True)
    seen = io.StringIO()  # a log, which is not put back

    def elsewhere():
        seen.write(str(observing.observer))
        recollect.checkpoint(torch.sin, x)

    def function():
        assert observing.observer is not None
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return recollect.checkpoint(torch.sin, x)

    assert recollect.explain(function).regions == 1
    assert seen.getvalue() == "None"
