# SPDX-License-Identifier: Apache-2.0
"""Hold your own strategy against the laws that a run relies on; needs no torch and no model.

Made-up clients answer through the very messages of a run, so what is tested is the whole way from
``configure_train`` to the kept arrays.

>>> from fedloom.strategies import FedNL
>>> report = check_strategy(FedNL, {"server.rule": "mean"}, only=("order-free", "one-client"))
>>> report.ok, str(report.verdicts[0])
(True, 'holds         order-free: replies in any order give the same arrays')
"""

from fedloom.testing.bench import LawBroken as LawBroken
from fedloom.testing.bench import Member as Member
from fedloom.testing.laws import LAWS as LAWS
from fedloom.testing.report import Law as Law
from fedloom.testing.report import Report as Report
from fedloom.testing.report import Verdict as Verdict
from fedloom.testing.report import check_strategy as check_strategy
from fedloom.testing.report import laws as laws
