"""One sum is opened once, whatever was stopped or started anew in between."""

from __future__ import annotations

import stat

import pytest

from fedloom.errors import Refusal
from fedloom.local.home import root
from fedloom.local.opened import check_unopened, enter_opened

RUN = "ab" * 16


def test_a_sum_is_opened_once_and_none_before_it():
    check_unopened(RUN, 3, 0)
    assert not root().exists()  # nothing is written for a question
    enter_opened(RUN, 3, 2)
    for number in (1, 2):
        for ask in (check_unopened, enter_opened):
            with pytest.raises(Refusal, match=f"client 3 has opened sum 2 .*, sum {number} came"):
                ask(RUN, 3, number)
    check_unopened(RUN, 3, 3)
    enter_opened(RUN, 4, 1)  # another client's, and another run's
    enter_opened("cd" * 16, 3, 1)
    enter_opened(RUN, 3, 5)
    with pytest.raises(Refusal, match="has opened sum 5"):
        enter_opened(RUN, 3, 4)
    folder = root() / RUN / "00003"
    assert (folder / "opened").read_text() == "5\n"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_cannot_be_written_down_is_not_opened():
    root().write_text("a file where a folder should be")
    with pytest.raises(Refusal, match="client 0 opens no sum that it cannot write down"):
        enter_opened(RUN, 0, 2)


def test_a_note_that_cannot_be_read_opens_nothing():
    enter_opened(RUN, 0, 1)
    (root() / RUN / "00000/opened").write_text("")
    with pytest.raises(Refusal, match="client 0 cannot tell which sums of this run it has opened"):
        enter_opened(RUN, 0, 2)
