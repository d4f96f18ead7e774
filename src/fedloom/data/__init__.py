# SPDX-License-Identifier: Apache-2.0
"""Who holds which rows: corpora, tasks, partitions with a seed and a hash."""
