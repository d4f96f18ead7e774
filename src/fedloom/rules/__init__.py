# SPDX-License-Identifier: Apache-2.0
"""How updates become one: plain functions on numpy arrays, streaming and order-free."""

from fedloom.rules.averaging import mean as mean
from fedloom.rules.averaging import momentum as momentum
from fedloom.rules.averaging import total as total
from fedloom.rules.contributions import LowRankUpdate as LowRankUpdate
from fedloom.rules.factors import Factors as Factors
from fedloom.rules.factors import Spectrum as Spectrum
from fedloom.rules.low_rank import Aggregate as Aggregate
from fedloom.rules.low_rank import Truncation as Truncation
from fedloom.rules.low_rank import fedex as fedex
from fedloom.rules.low_rank import fedit as fedit
from fedloom.rules.low_rank import fedsa as fedsa
from fedloom.rules.low_rank import ffa as ffa
from fedloom.rules.low_rank import flex as flex
from fedloom.rules.low_rank import relative_error as relative_error
from fedloom.rules.low_rank import rolora as rolora
from fedloom.rules.low_rank import rolora_side as rolora_side
from fedloom.rules.low_rank import stack as stack
from fedloom.rules.low_rank import svd_refactor as svd_refactor
from fedloom.rules.low_rank import target as target
from fedloom.rules.product_gap import ProductGap as ProductGap
