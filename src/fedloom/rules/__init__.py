# SPDX-License-Identifier: Apache-2.0
"""How updates become one: plain functions on numpy arrays."""
