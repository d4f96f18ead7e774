# SPDX-License-Identifier: Apache-2.0
"""FedRefine's inference: one receiver among the caches of others (arXiv 2603.28772)."""

from fedloom.refining.answer import Refinement as Refinement
from fedloom.refining.answer import Source as Source
from fedloom.refining.answer import prefixed as prefixed
