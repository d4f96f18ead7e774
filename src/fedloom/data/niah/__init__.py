# SPDX-License-Identifier: Apache-2.0
"""Needles in haystacks: FedNL's seven clients (arXiv 2605.16350, App. C.3) and RULER's eight tasks.

``words`` and ``events`` say what is hidden, ``haystack`` hides it in running text up to a budget of
tokens, ``examples`` makes a client's rows from a seed, ``encode`` turns them into tokens.
"""

from fedloom.data.niah.encode import EncodedLesson as EncodedLesson
from fedloom.data.niah.encode import EncodedNeedle as EncodedNeedle
from fedloom.data.niah.encode import encode_lesson as encode_lesson
from fedloom.data.niah.encode import encode_needle as encode_needle
from fedloom.data.niah.encode import encode_retelling as encode_retelling
from fedloom.data.niah.examples import NeedleExample as NeedleExample
