# SPDX-License-Identifier: Apache-2.0
"""Sums of which a server sees nothing but the sum (Bonawitz et al., CCS 2017)."""

from fedloom.secure.collector import Collector as Collector
from fedloom.secure.keys import Keys as Keys
from fedloom.secure.keys import Summation as Summation
from fedloom.secure.keys import least_threshold as least_threshold
from fedloom.secure.keys import threshold_for as threshold_for
from fedloom.secure.session import Session as Session
from fedloom.secure.session import advertise as advertise
from fedloom.secure.sums import as_sums as as_sums
from fedloom.secure.sums import decoded as decoded
from fedloom.secure.sums import encoded as encoded
from fedloom.secure.sums import from_sums as from_sums
