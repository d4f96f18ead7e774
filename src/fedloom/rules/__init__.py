# SPDX-License-Identifier: Apache-2.0
"""How updates become one: plain functions on numpy arrays, streaming and order-free."""

from fedloom.rules.averaging import Moments as Moments
from fedloom.rules.averaging import adam as adam
from fedloom.rules.averaging import mean as mean
from fedloom.rules.averaging import momentum as momentum
from fedloom.rules.averaging import total as total
from fedloom.rules.contributions import LowRankUpdate as LowRankUpdate
from fedloom.rules.controls import ControlSum as ControlSum
from fedloom.rules.controls import control_names as control_names
from fedloom.rules.controls import only_controls as only_controls
from fedloom.rules.controls import without_controls as without_controls
from fedloom.rules.exchange import Exchange as Exchange
from fedloom.rules.exchange import is_memory_array as is_memory_array
from fedloom.rules.exchange import is_side_array as is_side_array
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
from fedloom.rules.solving import Factorisation as Factorisation
from fedloom.rules.solving import FastWeights as FastWeights
from fedloom.rules.solving import solve as solve
from fedloom.rules.solving import solve_dual as solve_dual
from fedloom.rules.statistics import Gram as Gram
