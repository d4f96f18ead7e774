# SPDX-License-Identifier: Apache-2.0
"""What one language model can hand to another: a slice of its KV cache, measured and framed."""
