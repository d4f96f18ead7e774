# SPDX-License-Identifier: Apache-2.0
"""How updates become one: plain functions on numpy arrays, streaming and order-free."""

from fedloom.rules.averaging import mean as mean
from fedloom.rules.averaging import momentum as momentum
from fedloom.rules.averaging import total as total
from fedloom.rules.product_gap import ProductGap as ProductGap
