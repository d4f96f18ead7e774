# SPDX-License-Identifier: Apache-2.0
"""FedRefine's inference: one receiver among the caches of others (arXiv 2603.28772)."""

from fedloom.refining.answer import Refinement as Refinement
from fedloom.refining.answer import Source as Source
from fedloom.refining.answer import prefixed as prefixed
from fedloom.refining.fallback import refine_or_ask as refine_or_ask
from fedloom.refining.mutual import Party as Party
from fedloom.refining.mutual import mutual as mutual
from fedloom.refining.offers import Log as Log
from fedloom.refining.offers import decide as decide
from fedloom.refining.private import Reworded as Reworded
from fedloom.refining.private import check_private as check_private
from fedloom.refining.private import marked as marked
from fedloom.refining.private import reworded as reworded
from fedloom.refining.private import reworded_text as reworded_text
from fedloom.refining.receipt import Receipt as Receipt
from fedloom.refining.receipt import SourceReceipt as SourceReceipt
from fedloom.refining.refine import Answer as Answer
from fedloom.refining.refine import measured as measured
from fedloom.refining.refine import refine as refine
from fedloom.refining.selected import refine_selected as refine_selected
from fedloom.refining.sources import Ask as Ask
from fedloom.refining.sources import Request as Request
from fedloom.refining.sources import Sender as Sender
from fedloom.refining.sources import SourceLost as SourceLost
from fedloom.refining.sources import export as export
from fedloom.refining.sources import local as local
from fedloom.refining.terms import Terms as Terms
from fedloom.refining.text import Written as Written
from fedloom.refining.text import background as background
from fedloom.refining.together import together as together
