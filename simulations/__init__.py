# SPDX-License-Identifier: Apache-2.0
"""Things that are run: apps, recipes, the runner, reports, the command line."""
