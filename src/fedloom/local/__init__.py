# SPDX-License-Identifier: Apache-2.0
"""What a client does with its own rows, and what it keeps between rounds: one file a method."""
